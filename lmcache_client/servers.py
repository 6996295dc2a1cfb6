"""The client of an engine's scheduler side. The engine's ranks may use several servers, as if they were one.
Requests return their Pending at once.

A hit is the largest resume point that all servers promise. Servers that promise more are asked again, up to
the least of the answers, until all say the same. If one is lost, none is used.
"""

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import msgspec

from lmcache_client.contract.control import Follow, Followed
from lmcache_client.contract.messages import Accept, Clear, Cleared, Found, Joined, Lookup, Message, Release
from lmcache_client.engine import join
from lmcache_client.server_channel import Channel, Pending
from lmcache_client.transport import System

RELEASE_S = 5.0
FOLLOW_S = 2.0
CLEAR_S = 5.0
MAX_ROUNDS = 8
"""Servers that still disagree after so many questions promise nothing together."""


class Channels:
    """The channels to all servers, used as one."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels

    @property
    def system(self) -> System:
        return self._channels[0].system

    @property
    def ready(self) -> bool:
        return all(channel.ready for channel in self._channels)

    @property
    def responsive(self) -> bool:
        return all(channel.responsive for channel in self._channels)

    @property
    def generation(self) -> int:
        """Changes whenever one of the servers has registered this engine anew."""
        return sum(channel.generation for channel in self._channels)

    def start(self, connect_s: float, register_s: float) -> None:
        for channel in self._channels:
            channel.start(connect_s, register_s)

    def poll(self, pending: Pending | None = None, wait_s: float = 0.0) -> None:
        """As Channel.poll; waits for a Together."""
        limit_s = self.system.now_s() + wait_s
        for channel in self._channels:
            channel.poll()
        while isinstance(pending, Together) and not pending.advance():
            left_s = limit_s - self.system.now_s()
            part = next((part for part in pending.parts if not part.pending.done), None)
            if left_s <= 0 or (part and not part.channel.ready):
                return
            if part:  # else the keeper has just taken in the last reply
                part.channel.poll(part.pending, left_s)

    def close(self, goodbye_s: float = 1.0) -> None:
        for channel in self._channels:
            channel.close(goodbye_s)


class Part(NamedTuple):
    """A question to one server, and the registration in which it was asked."""

    channel: Channel
    pending: Pending
    generation: int

    @classmethod
    def of(cls, channel: Channel, message: Message, timeout_s: float) -> "Part":
        """Asks. If a lookup is answered too late, the lease is given back."""
        on_late = partial(give_back, channel) if isinstance(message, Lookup) else None
        return cls(channel, channel.submit(message, timeout_s, on_late), channel.generation)


def give_back(channel: Channel, reply: Message | None) -> None:
    """Releases the lease of an answer that is of no use."""
    if isinstance(reply, Found) and reply.lease_id:
        channel.submit(Release((reply.lease_id,), ()), RELEASE_S)


class Together(Pending):
    """One question to all servers. It is done when all have answered, or one cannot. A reply of another
    `kind` is that of all."""

    __slots__ = ("kind", "parts")

    def __init__(
        self, channels: Sequence[Channel], question: Message, timeout_s: float, kind: type[Message]
    ) -> None:
        super().__init__(math.inf)  # the parts have deadlines
        self.kind, self.parts = kind, [Part.of(channel, question, timeout_s) for channel in channels]

    def merge(self, replies: list[Any]) -> Message | None:
        """One reply of theirs, here the first; None if it has asked again and replaced `parts`."""
        return replies[0]  # type: ignore[no-any-return]

    def fail_all(self) -> None:
        """One server cannot answer: gives up what the others have promised."""

    def advance(self) -> bool:
        """As Pending.advance; may ask again."""
        # Again after a merge that asked again: if a server was lost meanwhile, its part fails at once.
        while not self.done:
            replies = list[Message]()
            for _, pending, _ in self.parts:
                self.error = pending.error or self.error
                replies += (pending.reply,) if pending.reply is not None else ()
            if self.error is not None:
                self.fail_all()
            elif len(replies) < len(self.parts):
                return False
            else:
                other = next((each for each in replies if not isinstance(each, self.kind)), None)
                if other is not None:
                    self.fail_all()
                self.reply = other or self.merge(replies)
        return True


class LookupOfAll(Together):
    """Asks until all servers promise the same resume point."""

    __slots__ = ("_first", "_limit_s", "_question", "_rounds", "_servers")

    def __init__(self, servers: "Servers", question: Lookup, timeout_s: float) -> None:
        super().__init__(servers.channels, question, timeout_s, Found)
        self._servers, self._question, self._rounds = servers, question, 1
        self._limit_s = servers.channel.system.now_s() + timeout_s
        self._first: list[Found] = []

    def merge(self, found: list[Found]) -> Message | None:
        if len(found) == 1 and not (found[0].resume_tokens or found[0].lease_id or found[0].l1_tokens):
            return found[0]  # the usual miss
        self._first = self._first or found
        least = min(each.resume_tokens for each in found)
        if not least or self._rounds == MAX_ROUNDS:
            for part, each in zip(self.parts, found, strict=True):
                give_back(part.channel, each)
            return _merged(found, self._first, 0, 0)
        if self._agree(found, least):
            return _merged(found, self._first, least, self._servers.remember(found, self.parts))
        self._rounds += 1
        keys = self._question.keys[: least * len(self._question.keys) // self._question.limit_tokens]
        again = msgspec.structs.replace(self._question, keys=keys, limit_tokens=least)
        left_s = self._limit_s - self._servers.channel.system.now_s()
        for index, (channel, each) in enumerate(zip(self._servers.channels, found, strict=True)):
            if each.resume_tokens > least:
                give_back(channel, each)
                self.parts[index] = Part.of(channel, again, left_s)
        return None

    @staticmethod
    def _agree(found: Sequence[Found], least: int) -> bool:
        return all(each.resume_tokens == least for each in found)

    def fail_all(self) -> None:
        self._servers.forget(self)


class FollowOfAll(Together):
    """Asks how far all servers can restore a chain, and what any has forgotten."""

    def merge(self, told: list[Followed]) -> Message:
        gone = tuple(dict.fromkeys(key for each in told for key in each.gone))
        return Followed(min(each.resume_tokens for each in told), gone, any(each.missed for each in told))


class Servers:
    """One client for one to n servers. Leases in its replies are numbers of its own."""

    def __init__(self, channels: Sequence[Channel], engine_id: str) -> None:
        self.channels, self._engine_id = channels, engine_id
        # Usually there is one, which is read for each request in every step.
        self.channel = channels[0] if len(channels) == 1 else Channels(channels)
        self._joined: dict[Channel, tuple[bytes, Joined]] = {}
        """With the boot id of the server that said so: the keepers of two servers may join at once."""
        self._leases: dict[int, list[tuple[int, int]]] = {}
        """By our own number: each server's lease, and its registration."""
        self._next = 1

    def join(self, channel: Channel) -> Joined:
        """Joins the engine at one of the servers; for `on_up`. Raises ChannelError, and ValueError if the
        servers do not fit together."""
        joined = join(channel, self._engine_id)
        self._joined[channel] = channel.boot_id, joined
        every = [(other, *said) for other, said in self._joined.copy().items()]
        sizes = {other: each.chunk_size for other, boot_id, each in every if boot_id == other.boot_id}
        if any(size != joined.chunk_size for size in sizes.values()):
            said = ", ".join(f"{size} at {other.address}" for other, size in sizes.items())
            raise ValueError(
                f"its servers have chunk sizes that differ, {said}: give all the same --chunk-size"
            )
        known = [each for _, _, each in every]
        fetches = any(each.fetches for each in known)
        if len(known) < len(self.channels):  # what they hold together is not known yet
            return Joined(True, joined.chunk_size, fetches)
        l1_bytes = sum(each.l1_bytes for each in known)
        return Joined(True, joined.chunk_size, fetches, l1_bytes, min(each.capacity_tokens for each in known))

    def lookup(self, question: Lookup, timeout_s: float) -> Together:
        """Asks all servers for a resume point. The reply is a Found, whose lease is one of `leases`."""
        return LookupOfAll(self, question, timeout_s)

    def remember(self, found: Sequence[Found], parts: Sequence[Part]) -> int:
        """Our own number for the leases of these answers."""
        number, self._next = self._next, self._next + 1
        of_each = zip(found, parts, strict=True)
        self._leases[number] = [(each.lease_id, part.generation) for each, part in of_each]
        return number

    def leases(self, lease_id: int) -> tuple[int, ...]:
        """The lease of each server."""
        return tuple(lease for lease, _ in self._leases.get(lease_id, ()))

    def forget(self, lookup: Together) -> None:
        """Stops waiting for a lookup and releases what the servers have promised or will promise."""
        if isinstance(lookup.reply, Found):
            self._leases.pop(lookup.reply.lease_id, None)
        for channel, pending, generation in lookup.parts:
            channel.abandon(pending)
            if channel.generation == generation:
                give_back(channel, pending.reply)

    def release(
        self, leases: tuple[int, ...], keys: tuple[bytes, ...] = (), request_id: str = "", answers: int = 0
    ) -> None:
        """Ends leases and marks the chunks of `keys` as used, but for the last `answers`. Pass `request_id`
        only if that request has ended."""
        held = [self._leases.pop(number, ()) for number in leases]
        for index, channel in enumerate(self.channels):
            # A restarted server may have given the same number to another lease.
            own = tuple(each[index][0] for each in held if each and each[index][1] == channel.generation)
            if own or keys or request_id:
                channel.submit(Release(own, keys, request_id, answers), RELEASE_S)

    def accept(self, lookups: Sequence[tuple[str, int]]) -> None:
        """Has the servers count early lookups: request ids with the tokens that the engine itself holds."""
        for channel in self.channels:
            channel.submit(Accept(tuple(lookups)), RELEASE_S)

    def follow(self, keys: Sequence[bytes]) -> Together:
        """Asks how far a chain can be restored by all, and what any server has forgotten. The reply is a
        Followed."""
        return FollowOfAll(self.channels, Follow(tuple(keys)), FOLLOW_S, Followed)

    def clear(self) -> Together:
        """Has all servers forget the chunks of this engine's namespace. The reply is a Cleared."""
        return Together(self.channels, Clear(), CLEAR_S, Cleared)


def _merged(found: Sequence[Found], first: Sequence[Found], resume_tokens: int, lease_id: int) -> Found:
    """What all servers have together. The bitmaps are those of the first answers, which cover all chunks."""
    held: tuple[bytes, ...] = ()
    if len({len(each.held) for each in first}) == 1:
        held = tuple(reduce(_both, maps) for maps in zip(*(each.held for each in first), strict=True))
    least = min(first, key=lambda each: each.resume_tokens)
    l1_tokens = min(resume_tokens, *(each.l1_tokens for each in first))
    return Found(resume_tokens, lease_id, min(each.lease_s for each in found), held, least.missed, l1_tokens)


def _both(one: bytes, other: bytes) -> bytes:
    """The bits that are set in both, as far as both go."""
    return bytes(a & b for a, b in zip(one, other, strict=False))
