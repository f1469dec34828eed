"""Blocks of code in Markdown."""

from optkit.common.markdown import fenced


def test_a_fence_is_longer_than_those_in_the_text() -> None:
    assert fenced("a: 1\n", "yaml") == "```yaml\na: 1\n```"
    assert fenced("```\n## No heading", "yaml") == "````yaml\n```\n## No heading\n````"
