"""Clients that stream through the router all the time, and what their answers must never show."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field

import httpx


@dataclass
class Disturbances:
    """When a step did what may cut a stream: to one model, or to all through the router."""

    at: list[tuple[float, str]] = field(default_factory=list)

    def add(self, whom: str) -> None:
        self.at.append((time.monotonic(), whom))

    def excuse(self, model: str, begun: float, ended: float) -> bool:
        """Whether a stream of ``model`` between these times may have been cut."""
        return any(
            (whom == model and begun - 15.0 <= when <= ended) or (whom == "router" and begun - 40.0 <= when <= ended)
            for when, whom in self.at
        )


class Streamer(threading.Thread):
    """Asks one model for one stream after the other. ``must_serve``: this model must answer at all times."""

    def __init__(
        self,
        url: str,
        key: str,
        model: str,
        disturbances: Disturbances,
        *,
        tokens: int,
        pause_s: float,
        must_serve: bool,
    ) -> None:
        super().__init__(daemon=True, name=model)
        self._url, self._key, self._model = url, key, model
        self._disturbances = disturbances
        self._tokens, self._pause_s = tokens, pause_s
        self._must_serve = must_serve
        self._ending = threading.Event()
        self.whole = self.refused = self.excused = 0
        self.violations: list[str] = []

    def end(self) -> None:
        self._ending.set()

    def run(self) -> None:
        body = {
            "model": self._model, "stream": True, "max_tokens": self._tokens, "ignore_eos": True,
            "messages": [{"role": "user", "content": "Tell me about rivers."}],
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {self._key}"}
        while not self._ending.is_set():
            begun = time.monotonic()
            fault = ""
            try:
                with httpx.Client(timeout=60) as client:
                    with client.stream("POST", self._url, headers=headers, json=body) as answer:
                        text = answer.read().decode()
                    fault = self._judge(answer.status_code, text)
            except httpx.HTTPError as exc:
                fault = f"cut: {exc!r}"
            ended = time.monotonic()
            if fault and self._disturbances.excuse(self._model, begun, ended):
                self.excused += 1
            elif fault:
                self.violations.append(f"client of {self._model}, {ended - begun:.1f} s into it: {fault}")
            self._ending.wait(self._pause_s)

    def _judge(self, code: int, text: str) -> str:
        if code != 200:
            self.refused += 1
            wrong = self._must_serve or code in (400, 401, 403, 500)
            return f"status {code} {text[:300]}" if wrong else ""
        data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        wrong_model = wrong_answer(data, self._model)
        if wrong_model:
            self.violations.append(wrong_model)  # nothing excuses this
        if not data or data[-1] != "[DONE]":
            return f"cut after {len(data)} events: {text[-300:]}"
        self.whole += 1
        return ""


class Caller(threading.Thread):
    """One request for a model that may have to be brought up: it is answered or refused, and never left hanging."""

    #: The router's own limit for those who wait, and a while to answer.
    LIMIT_S = 100.0

    def __init__(self, url: str, key: str, model: str, disturbances: Disturbances) -> None:
        super().__init__(daemon=True, name=f"asks for {model}")
        self._url, self._key, self._model = url, key, model
        self._disturbances = disturbances
        self.violations: list[str] = []

    def run(self) -> None:
        begun = time.monotonic()
        fault = ""
        try:
            code, text = ask_once(self._url, self._key, self._model, self.LIMIT_S)
            if code not in (200, 429, 503):
                fault = f"status {code} {text[:300]}"
        except httpx.HTTPError as exc:
            fault = repr(exc)
        ended = time.monotonic()
        if fault and not self._disturbances.excuse(self._model, begun, ended):
            self.violations.append(f"one who asked for {self._model}, {ended - begun:.1f} s into it: {fault}")


def ask_once(url: str, key: str, model: str, limit_s: float) -> tuple[int, str]:
    """Status and body of one short answer. Raises httpx.HTTPError."""
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    answer = httpx.post(url, headers={"Authorization": f"Bearer {key}"}, json=body, timeout=limit_s)
    return answer.status_code, answer.text


def wrong_answer(data: list[str], model: str) -> str:
    """A sentence when an event of the stream carries another model's name."""
    for line in data:
        if line != "[DONE]":
            try:
                name = json.loads(line).get("model", model)
            except ValueError:
                continue  # half an event of a stream that was cut
            if name != model:
                return f"answer of the wrong model: asked {model}, got {name}"
    return ""
