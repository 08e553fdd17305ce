"""What a key may spend: requests and tokens per minute, and how much at once.

Each limit is a bucket that refills steadily on the monotonic clock, so there is no minute at whose turn an old count
could go on blocking. Tokens are paid after the answer, when they are known: a key whose token bucket is empty waits
until it has refilled above zero. Several router processes tell each other what they took (``peers``); between two
exchanges, and with the broker away, each counts its own.
"""

from __future__ import annotations

import time

from models_app.router.errors import RouterError
from models_app.router.table import Key

Header = tuple[bytes, bytes]


class Bucket:
    """``per_minute`` units flow in per minute, and no more than that is ever held."""

    __slots__ = ("level", "per_minute", "seen_at")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self.seen_at = now

    def refill(self, per_minute: int, now: float) -> None:
        if per_minute != self.per_minute:  # the operator changed the limit: what was spent stays spent
            self.level += per_minute - self.per_minute
            self.per_minute = per_minute
        self.level = min(float(per_minute), self.level + (now - self.seen_at) * per_minute / 60.0)
        self.seen_at = now

    def seconds_until(self, level: float) -> float:
        if self.per_minute <= 0:
            return 60.0
        return max(0.0, (level - self.level) * 60.0 / self.per_minute)


class Spending:
    """What one key has spent in this process, and what it has under way."""

    __slots__ = ("inflight", "inflight_elsewhere", "requests", "requests_due", "tokens", "tokens_due", "used_at")

    def __init__(self) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.inflight = 0
        self.inflight_elsewhere = 0
        self.requests_due = 0
        self.tokens_due = 0
        self.used_at = 0.0


class Limiter:
    """Counts per key. A key without limits costs one look at three fields."""

    def __init__(self) -> None:
        self._keys: dict[int, Spending] = {}

    def enter(self, key: Key) -> list[Header] | None:
        """Take one request, or raise 429.

        Answers the rate-limit headers of the response, and ``leave`` must follow; None for a key without limits.
        """
        if key.rpm is None and key.tpm is None and key.max_concurrency is None:
            return None
        now = time.monotonic()
        spending = self._keys.get(key.id)
        if spending is None:
            spending = self._keys[key.id] = Spending()
        spending.used_at = now
        requests = self._bucket(spending, "requests", key.rpm, now)
        tokens = self._bucket(spending, "tokens", key.tpm, now)
        if requests is not None and requests.level < 1.0:
            self._refuse(key, spending, "requests", f"{key.rpm} requests per minute", requests.seconds_until(1.0))
        if tokens is not None and tokens.level <= 0.0:
            self._refuse(key, spending, "tokens", f"{key.tpm} tokens per minute", tokens.seconds_until(1.0))
        if key.max_concurrency is not None and spending.inflight + spending.inflight_elsewhere >= key.max_concurrency:
            self._refuse(key, spending, "concurrency", f"{key.max_concurrency} requests at once", 1.0)
        if requests is not None:
            requests.level -= 1.0
            spending.requests_due += 1
        spending.inflight += 1
        return self._headers(key, spending)

    def leave(self, key: Key, tokens: int) -> None:
        """The request ended and used ``tokens`` tokens in all."""
        spending = self._keys.get(key.id)
        if spending is None:
            return
        spending.inflight = max(0, spending.inflight - 1)
        if spending.tokens is not None and tokens:
            spending.tokens.level -= tokens
            spending.tokens_due += tokens

    @staticmethod
    def _bucket(spending: Spending, name: str, per_minute: int | None, now: float) -> Bucket | None:
        if per_minute is None:
            setattr(spending, name, None)
            return None
        bucket: Bucket | None = getattr(spending, name)
        if bucket is None:
            bucket = Bucket(per_minute, now)
            setattr(spending, name, bucket)
        else:
            bucket.refill(per_minute, now)
        return bucket

    def _refuse(self, key: Key, spending: Spending, what: str, limit: str, wait_s: float) -> None:
        raise RouterError(
            429,
            "rate_limit_exceeded" if what != "concurrency" else "concurrency_limit_exceeded",
            f"The key '{key.name}' is limited to {limit}. Try again in {max(1, round(wait_s + 0.5))} s.",
            retry_after_s=max(1.0, wait_s),
            headers=tuple(self._headers(key, spending)),
        )

    @staticmethod
    def _headers(key: Key, spending: Spending) -> list[Header]:
        headers: list[Header] = []
        for name, bucket in ((b"requests", spending.requests), (b"tokens", spending.tokens)):
            if bucket is not None:
                left = max(0, int(bucket.level))
                full_in = bucket.seconds_until(float(bucket.per_minute))
                headers.append((b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute))
                headers.append((b"x-ratelimit-remaining-" + name, b"%d" % left))
                headers.append((b"x-ratelimit-reset-" + name, b"%.3fs" % full_in))
        if key.max_concurrency is not None:
            free = max(0, key.max_concurrency - spending.inflight - spending.inflight_elsewhere)
            headers.append((b"x-ratelimit-limit-concurrency", b"%d" % key.max_concurrency))
            headers.append((b"x-ratelimit-remaining-concurrency", b"%d" % free))
        return headers

    # --- several processes ------------------------------------------------------------------------------

    def take_debits(self) -> dict[int, tuple[int, int, int]]:
        """Per key: requests and tokens taken here since the last call, and requests under way here now."""
        debits: dict[int, tuple[int, int, int]] = {}
        stale_before = time.monotonic() - 3600.0
        for key_id, spending in list(self._keys.items()):
            if spending.requests_due or spending.tokens_due or spending.inflight:
                debits[key_id] = (spending.requests_due, spending.tokens_due, spending.inflight)
                spending.requests_due = spending.tokens_due = 0
            elif spending.used_at < stale_before and not spending.inflight_elsewhere:
                del self._keys[key_id]
        return debits

    def give_back(self, debits: dict[int, tuple[int, int, int]]) -> None:
        """The debits could not be told to the others: tell them next time."""
        for key_id, (requests, tokens, _) in debits.items():
            spending = self._keys.get(key_id)
            if spending is not None:
                spending.requests_due += requests
                spending.tokens_due += tokens

    def debit(self, key_id: int, requests: int, tokens: int) -> None:
        """Another process took this much of the key's buckets."""
        spending = self._keys.get(key_id)
        if spending is None:
            return
        if spending.requests is not None:
            spending.requests.level -= requests
        if spending.tokens is not None:
            spending.tokens.level -= tokens

    def elsewhere(self, key_id: int, inflight: int) -> None:
        """What the key has under way in other processes."""
        spending = self._keys.get(key_id)
        if spending is None:
            if not inflight:
                return
            spending = self._keys[key_id] = Spending()
            spending.used_at = time.monotonic()
        spending.inflight_elsewhere = inflight
