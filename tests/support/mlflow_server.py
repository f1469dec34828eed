"""MLflow's own server with SQLite, in a thread of this process: real HTTP and a start without another import."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any


class Server:
    """Where it answers, and whom."""

    url = ""
    token = ""
    """What requests must bear; empty for all."""
    refused: str = ""
    """A file whose next upload is refused."""


@contextmanager
def serving(home: Path) -> Iterator[Server]:
    """Give a server whose database and artifacts lie in `home`, until the block ends."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{home}/mlflow.db"
    os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = "mlflow-artifacts:/"
    os.environ["_MLFLOW_SERVER_ARTIFACT_DESTINATION"] = f"{home}/artifacts"
    os.environ["_MLFLOW_SERVER_SERVE_ARTIFACTS"] = "true"
    import mlflow
    from mlflow.server import app, handlers
    from werkzeug.serving import WSGIRequestHandler, make_server

    handlers._get_tracking_store()
    handlers._get_model_registry_store()
    # The server made its database the default of this process.
    mlflow.set_tracking_uri("")
    mlflow.set_registry_uri("")
    found = Server()

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if found.token and environ.get("HTTP_AUTHORIZATION") != f"Bearer {found.token}":
            start("401 Unauthorized", [("content-type", "text/plain")])
            return [f"not you: {environ.get('HTTP_AUTHORIZATION')}".encode()]
        if found.refused and environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith(found.refused):
            found.refused = ""
            start("400 Bad Request", [("content-type", "text/plain")])
            return [b"the disk is full"]
        answer: Iterable[bytes] = app(environ, start)
        return answer

    class Quiet(WSGIRequestHandler):
        def log(self, *_: object) -> None:
            return None

    server = make_server("127.0.0.1", 0, guarded, threaded=True, request_handler=Quiet)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for name in [name for name in os.environ if name.startswith("_MLFLOW_SERVER_")]:
            del os.environ[name]
