"""A clock that a stand-in of a session moves."""

from tests.support.bigram_session import BigramSession


class Clock:
    """A clock that only the session moves."""

    def __init__(self, session: BigramSession, first_s: float = 0.5, between_s: float = 0.1) -> None:
        self.now = 0.0
        self.answers = 0
        self.first_s, self.between_s = first_s, between_s
        self.slow_answers: dict[int, float] = {}
        session.on_token = self.tick

    def tick(self, batch: int, index: int) -> None:
        self.answers += index == 0
        factor = self.slow_answers.get(self.answers, 1.0)
        self.now += factor * (self.first_s if index == 0 else self.between_s)
