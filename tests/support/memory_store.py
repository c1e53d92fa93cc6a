"""A key-value store as process groups have one, without a network."""

from __future__ import annotations

from collections import Counter


class Memory:
    """Counts its requests and the keys that it holds; only the test leaves anything in it."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.most_held = 0

    def set(self, key: str, value: str) -> None:
        self.asked["set"] += 1
        self.held[key] = value.encode()
        self.most_held = max(self.most_held, len(self.held))

    def get(self, key: str) -> bytes:
        self.asked["get"] += 1
        return self.held[key]

    def add(self, key: str, value: int) -> int:
        self.asked["add"] += 1
        total = int(self.held.get(key, b"0")) + value
        self.held[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        self.asked["check"] += 1
        return all(key in self.held for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked["multi_get"] += 1
        return [self.held[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        self.asked["delete"] += 1
        return self.held.pop(key, None) is not None
