"""Clients of a running Sardeenz: an API session that launches models, and threads that chat without a pause."""

from __future__ import annotations

import json
import threading
import time
from types import TracebackType
from typing import Any

import httpx

from tests.sardeenz_site.stack import Stack, wait_for


class Api:
    """REST with a key; paths are below /api/v1."""

    def __init__(self, stack: Stack) -> None:
        self.key = stack.manage("create_api_key", f"key{time.monotonic_ns()}", "--role", "operator").split()[-1]
        self.client = httpx.Client(
            base_url=f"{stack.url}/api/v1", headers={"Authorization": f"Bearer {self.key}"}, timeout=20
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, (path, answer.status_code, answer.text)
        return answer.json()

    def post(self, path: str, **body: Any) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code < 300, (path, answer.status_code, answer.text)
        return answer.json()

    def launch(self, name: str, **model: Any) -> int:
        """Make and launch a model of the catalogue; returns the instance's id."""
        self.post("/models", **{"served_model_name": name, "source": "catalogue", "model": "Qwen/Qwen3-0.6B", **model})
        return int(self.post(f"/models/{name}/launch")["id"])

    def state(self, instance: int) -> str:
        return str(self.get(f"/instances/{instance}")["state"])

    def wait_state(self, instance: int, state: str, limit_s: float = 90.0) -> None:
        seen: list[str] = []

        def there() -> bool:
            seen.append(self.state(instance))
            return seen[-1] == state

        wait_for(there, limit_s, f"instance {instance} {state}, saw {sorted(set(seen))}")


class Chat(threading.Thread):
    """Streams one answer after the other from the fast router until the block ends. ``faults`` says what went wrong."""

    def __init__(self, stack: Stack, key: str, model: str) -> None:
        super().__init__(daemon=True)
        self._url = f"{stack.router_url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._body = {"model": model, "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": "Hi"}]}
        self._ending = threading.Event()
        self.answers = 0
        self.faults: list[str] = []

    def run(self) -> None:
        with httpx.Client(timeout=30) as client:
            while not self._ending.is_set():
                try:
                    with client.stream("POST", self._url, headers=self._headers, json=self._body) as answer:
                        text = answer.read().decode()
                    if answer.status_code != 200 or not text.rstrip().endswith("data: [DONE]"):
                        self.faults.append(f"{answer.status_code} {text[-300:]}")
                    else:
                        self.answers += 1
                except httpx.HTTPError as exc:
                    self.faults.append(repr(exc))
                time.sleep(0.02)

    def __enter__(self) -> Chat:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._ending.set()
        self.join(40)

    def more(self) -> None:
        """Wait until another answer came in whole."""
        before = self.answers
        wait_for(lambda: self.answers > before or bool(self.faults), 30, "another answer")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    found = json.loads(answer.text)
    assert isinstance(found, dict)
    return found
