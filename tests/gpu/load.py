"""Traffic through the router: concurrent streamed completions of random token ids, each with its own record."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Record:
    """One request: seconds relative to the burst's start, and a digest of its text."""

    ok: bool = False
    error: str = ""
    tokens: int = 0
    ttft_s: float | None = None
    longest_pause_s: float = 0.0
    end_s: float = 0.0
    digest: str = ""
    finish: str | None = None


@dataclass
class Burst:
    """``n`` requests at once, in a thread of its own, so that limits can be changed in the middle."""

    url: str
    key: str
    model: str
    n: int
    prompt_tokens: int
    max_tokens: int
    seed: int = 1
    stagger_s: float = 0.0
    limit_s: float = 300.0
    records: list[Record] = field(default_factory=list)

    def start(self) -> Burst:
        self.began = time.monotonic()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()), daemon=True)
        self._thread.start()
        return self

    def join(self) -> Burst:
        self._thread.join(self.limit_s + 30)
        self.took_s = time.monotonic() - self.began
        return self

    def run(self) -> Burst:
        return self.start().join()

    def took_s_so_far(self) -> float:
        return time.monotonic() - self.began

    async def _all(self) -> None:
        rng = random.Random(self.seed)
        prompts = [[rng.randrange(32, 127) for _ in range(self.prompt_tokens)] for _ in range(self.n)]
        self.records = [Record() for _ in prompts]
        timeout = aiohttp.ClientTimeout(total=self.limit_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=2**20) as session:
            await asyncio.gather(*(self._one(session, i, prompt, self.records[i]) for i, prompt in enumerate(prompts)))

    async def _one(self, session: aiohttp.ClientSession, i: int, prompt: list[int], record: Record) -> None:
        await asyncio.sleep(i * self.stagger_s)
        body: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": self.max_tokens, "ignore_eos": True,
            "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        began, last, text = time.monotonic(), None, []
        try:
            async with session.post(
                f"{self.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {self.key}"}
            ) as response:
                if response.status != 200:
                    record.error = f"{response.status} {(await response.text())[:300]}"
                    return
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    now = time.monotonic()
                    if "error" in event:
                        record.error = json.dumps(event["error"])[:300]
                    if event.get("usage"):
                        record.tokens = event["usage"]["completion_tokens"]
                    for choice in event.get("choices", ()):
                        text.append(choice.get("text", ""))
                        record.finish = choice.get("finish_reason") or record.finish
                        if last is None:
                            record.ttft_s = now - began
                        else:
                            record.longest_pause_s = max(record.longest_pause_s, now - last)
                        last = now
            record.ok = record.finish == "length" and record.tokens == self.max_tokens and not record.error
        except Exception as exc:  # every failure is a figure
            record.error = f"{type(exc).__name__}: {exc}"[:300]
        finally:
            record.end_s = time.monotonic() - self.began
            record.digest = hashlib.sha256("".join(text).encode()).hexdigest()[:16]

    @property
    def complete(self) -> bool:
        """Whether every request got all of its tokens."""
        return len(self.records) == self.n and all(record.ok for record in self.records)

    @property
    def digests(self) -> list[str]:
        return [record.digest for record in self.records]

    def summary(self) -> dict[str, Any]:
        ttft = sorted(r.ttft_s for r in self.records if r.ttft_s is not None)
        errors = [r.error or f"{r.finish} {r.tokens}" for r in self.records if not r.ok]
        return {
            "requests": self.n,
            "ok": sum(r.ok for r in self.records),
            "errors": errors[:3],
            "took_s": round(self.took_s, 2),
            "tokens_per_s": round(sum(r.tokens for r in self.records) / self.took_s, 1),
            "ttft_mean_s": round(statistics.fmean(ttft), 3) if ttft else None,
            "ttft_p99_s": round(ttft[min(len(ttft) - 1, int(len(ttft) * 0.99))], 3) if ttft else None,
            "longest_pause_s": round(max((r.longest_pause_s for r in self.records), default=0), 2),
        }
