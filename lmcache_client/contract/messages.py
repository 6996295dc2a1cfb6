"""All messages between the connector and the server.

A client (ZeroMQ DEALER) sends one frame: the MessagePack array [PROTOCOL_VERSION, request id, message].
The server (ROUTER) answers it with one frame [PROTOCOL_VERSION, request id, boot id, message]; a reply may
overtake an earlier one. A message is an array of its code, which is the `tag` of its class, and its fields.
If a request fails, the reply is Refused. Messages carry keys, never tokens, and the locations of pages, never
their contents.
"""

from typing import Annotated

from msgspec import Meta, Raw, Struct

from lmcache_client.contract import codec, control
from lmcache_client.contract.codec import MAX_MESSAGE_BYTES, Natural, ProtocolError, Text, Wire
from lmcache_client.contract.control import Follow, Followed, Inspect, Inspected, Missed, Status, StatusReport
from lmcache_client.contract.geometry import MAX_GROUPS, Geometry
from lmcache_client.contract.keys import Key, Keys, ModelTag, TenantId

PROTOCOL_VERSION, DEFAULT_PORT = 16, 5555
BOOT_ID_BYTES = CLIENT_ID_BYTES = UUID_BYTES = 16
NONCE_BYTES, HANDLE_BYTES, HEAD_BYTES = 32, 64, 32
"""The version and the id of a request lie within HEAD_BYTES."""
MAX_NAME, MAX_PIN_NAME, REQUEST_TOKEN_CHARS = 256, 64, 16
MAX_REASON, MAX_BUFFERS, MAX_LEASES, MAX_OBJECTS, MAX_EARLY_CHUNKS = 1024, 1024, 4096, 4096, 512

Name = Annotated[str, Meta(max_length=MAX_NAME)]
PinName = Annotated[str, Meta(min_length=1, max_length=MAX_PIN_NAME)]
BootId = Annotated[bytes, Meta(min_length=BOOT_ID_BYTES, max_length=BOOT_ID_BYTES)]
Handle = Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
Bytes = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Range = tuple[Natural, Bytes]
BlockIds = bytes  # packed: a load has thousands, and so many Python numbers take their time
Shared = tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], Bytes]

# The codes of Refused. A client acts on the code and shows the message.
BAD_REQUEST, WRONG_VERSION, NOT_REGISTERED = "bad_request", "wrong_version", "not_registered"
CONFIGURATION, NO_ACCESS, ENGINE_ID_TAKEN = "configuration", "no_access", "engine_id_taken"
EXPIRED, COPY_FAILED, OVERLOADED, INTERNAL = "expired", "copy_failed", "overloaded", "internal"


class Hello(Wire, frozen=True, tag=0):
    """The first message of a session. `pid` is the client's process id in its own namespace. `client_id` is
    random and stays the same after a reconnection. Before it answers, the server ends this client's earlier
    session and its copies."""

    pid: Natural
    client_id: Annotated[bytes, Meta(min_length=CLIENT_ID_BYTES, max_length=CLIENT_ID_BYTES)]
    client_version: Name


class Welcome(Wire, frozen=True, tag=1):
    """The client must allow process `server_pid` to trace it (Yama). A reply whose boot id is not `boot_id`
    comes from a server that has restarted."""

    boot_id: BootId
    server_pid: Natural
    server_version: Text
    session_id: Natural


class Memory(Wire, frozen=True):
    """The ranges (start, bytes) that hold the pages of process `pid`.

    On a CPU, a start is an address, and the nonce goes to the NONCE_BYTES at `proof_address`. On a GPU,
    `device` is its UUID. Each range is in the allocation of a handle at the same position in `handles`, or in
    `descriptors` of a (file descriptor, bytes). The nonce goes to the first bytes of every range.
    """

    pid: Natural
    buffers: Annotated[tuple[Range, ...], Meta(max_length=MAX_BUFFERS)]
    proof_address: Natural
    device: bytes = b""
    handles: Annotated[tuple[Handle, ...], Meta(max_length=MAX_BUFFERS)] = ()
    descriptors: Annotated[tuple[Shared, ...], Meta(max_length=MAX_BUFFERS)] = ()

    def __post_init__(self) -> None:
        shared = self.handles or self.descriptors
        if self.device and (len(self.device) != UUID_BYTES or len(shared) != len(self.buffers)):
            raise ProtocolError(f"a GPU has a UUID of {UUID_BYTES} bytes and each of its buffers a handle")
        if self.descriptors and (self.handles or not self.device):
            raise ProtocolError("only a GPU has file descriptors, and then no other handles")
        if self.device and any(size < NONCE_BYTES for _, size in self.buffers):
            raise ProtocolError(f"a buffer on a GPU has at least {NONCE_BYTES} bytes")
        for (start, size), (_, num_bytes) in zip(self.buffers, self.descriptors, strict=False):
            if start + size > num_bytes:
                raise ProtocolError("a buffer reaches beyond the allocation of its file descriptor")


class Register(Wire, frozen=True, tag=2):
    """Gives the server access to a worker's KV cache memory. The reply is Challenge.

    The server forgets what an `ephemeral` engine stored when the last engine of its namespace is gone. Only
    ephemeral engines share that namespace.
    """

    engine_id: Name
    rank: Natural
    model: ModelTag
    geometry: Geometry
    memory: Memory
    ephemeral: bool = False


class Challenge(Wire, frozen=True, tag=3):
    """Asks the client to write `nonce` where its Memory says and then to send Prove. The two high bits of
    every byte are 0, so the nonce is a small finite number in every format of KV caches."""

    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Prove(Wire, frozen=True, tag=4):
    """The reply is Registered once the server has mapped the client's memory and read the nonce there."""


class Registered(Wire, frozen=True, tag=5):
    chunk_size: Natural
    warning: Text


class Join(Wire, frozen=True, tag=6):
    """The scheduler side asks whether its engine is registered."""

    engine_id: Text


class Joined(Wire, frozen=True, tag=7):
    """Until every worker of the engine is registered (`ready`), the rest means nothing. With `fetches`, the
    server has tiers: an answer to a lookup may take fetch_patience_s longer. L1 has `l1_bytes`, in which
    `capacity_tokens` of this model fit."""

    ready: bool
    chunk_size: Natural
    fetches: bool = False
    l1_bytes: Natural = 0
    capacity_tokens: Natural = 0


class NotCached(Wire, frozen=True, tag=8):
    """An engine says why it does not use the cache, as in "it has `reason`". The reply is Done."""

    engine_id: Name
    model: Name
    vllm_version: Name
    reason: Annotated[str, Meta(max_length=MAX_REASON)]


class Lookup(Wire, frozen=True, tag=9):
    """Asks how much of this chain of chunks the server can restore. The reply is Found.

    The engine itself holds `computed_tokens`, a multiple of the unified block size. `limit_tokens` is the
    largest useful resume point, a multiple of the chunk size below `num_tokens`, the request's length.
    `prefill_tokens_s` is how fast the engine computes prompts, in tokens per second; 0 while that is unknown.

    An `early` lookup is sent before anybody knows what the engine itself holds: Accept has it counted. It has
    at most MAX_EARLY_CHUNKS keys. `tenant` is that of StoreObject. `why` asks for the reasons of a miss.
    `once` says that this prompt will not come back. Chunks that any other prompt reads are worth keeping.
    """

    request_id: Name
    keys: Keys
    computed_tokens: Natural
    limit_tokens: Natural
    num_tokens: Natural
    prefill_tokens_s: Natural = 0
    early: bool = False
    tenant: TenantId = b""
    why: bool = False
    once: bool = False


class Found(Wire, frozen=True, tag=10):
    """`resume_tokens` is 0 if the server has nothing beyond the computed tokens; otherwise the lease
    `lease_id` keeps the tokens up to there restorable for `lease_s` seconds. `held` has a bitmap per group,
    lowest bit first, of the chunks that all shards have. `missed` is that of Inspected. Before tiers were
    asked, L1 had the resume point `l1_tokens`."""

    resume_tokens: Natural
    lease_id: Natural
    lease_s: Natural
    held: tuple[bytes, ...]
    missed: Missed = ()
    l1_tokens: Natural = 0


class Release(Wire, frozen=True, tag=11):
    """Ends leases and marks the chunks of `keys` as recently used, except for the last `answers`, which the
    request has generated. `request_id` serves the debug log, statistics and Pin; it is empty if the request
    itself goes on."""

    lease_ids: Annotated[tuple[Natural, ...], Meta(max_length=MAX_LEASES)]
    keys: Keys
    request_id: Name = ""
    answers: Natural = 0


class Load(Wire, frozen=True, tag=12):
    """Copies pages into the worker's blocks. `block_ids` has, for each group, the blocks at the positions
    `needed_blocks(resume_tokens, computed_tokens)`. The reply is Done when the bytes have arrived.

    `key` belongs to the chunk that ends at the resume point. It confirms the lease, whose number may be from
    before a restart of the server.
    """

    request_id: Name
    lease_id: Natural
    key: Key
    resume_tokens: Natural
    computed_tokens: Natural
    block_ids: Annotated[tuple[BlockIds, ...], Meta(max_length=MAX_GROUPS)]


class StoreObject(Wire, frozen=True):
    """One object: the ids of the group's blocks at the positions `stored_blocks(chunk_index, chunk_size)`.
    `parent` is the key of the previous chunk (or ROOT_KEY), which is evicted later than this one. `tenant`
    stands for the salt of the request; it is empty without a salt."""

    key: Key
    parent: Key
    chunk_index: Natural
    group: Natural
    block_ids: BlockIds
    tenant: TenantId = b""


class Store(Wire, frozen=True, tag=13):
    """Copies pages out of the worker's blocks, which must not change before the reply, Stored.
    `request_ids` names the requests that the chunks belong to and only serves the debug log and statistics.
    `once` says that they are of an answer, or of prompts that will not come back: the server first evicts the
    chunks that came only so and that no other prompt has read."""

    objects: Annotated[tuple[StoreObject, ...], Meta(max_length=MAX_OBJECTS)]
    request_ids: tuple[Name, ...] = ()
    once: bool = False

    def __post_init__(self) -> None:
        if len(self.request_ids) > len(self.objects):
            raise ProtocolError("a store names no more requests than objects")


class Stored(Wire, frozen=True, tag=14):
    """How many objects were stored, were already present (or being written), and were dropped."""

    stored: Natural
    present: Natural
    dropped: Natural


class Clear(Wire, frozen=True, tag=15):
    """Asks the server to forget the chunks of the scheduler's namespace or, with `everything`, those of this
    model, and of namespaces and tenants whose names, in hexadecimal digits, begin so. Empty ones name all.
    With `tiers`, their records in tiers are deleted, too; these do not say whose they are."""

    everything: bool = False
    model: Name = ""
    namespace: Name = ""
    tenant_digits: Name = ""
    tiers: bool = False


class Cleared(Wire, frozen=True, tag=16):
    """`tiers` names those that may have records of these chunks, or had them if they were to be cleared;
    `tiers_failed` those of them that could not be cleared, each with the reason."""

    chunks: Natural
    tiers: tuple[Text, ...] = ()
    tiers_failed: tuple[Text, ...] = ()


class Ping(Wire, frozen=True, tag=19):
    """Answered with Done. With a `session_id` it is refused as not_registered if that session has ended."""

    session_id: Natural = 0


class Goodbye(Wire, frozen=True, tag=20):
    """Ends the session. The reply is Done when none of its memory is mapped or being copied."""


class Done(Wire, frozen=True, tag=21): ...


class Refused(Wire, frozen=True, tag=22):
    """`code` is one of the constants above; `message` tells the user what to do."""

    code: Text
    message: Text


class Pin(Wire, frozen=True, tag=23):
    """Asks what the server holds of a request, and pins that under `name` until Unpin. The reply is Pinned.

    `request` is a random part of the request's id in Release. The server watches for it from the first Pin
    on, which therefore comes before the request. With an empty `name` nothing is pinned.
    """

    name: Annotated[str, Meta(max_length=MAX_PIN_NAME)]
    request: Annotated[str, Meta(min_length=REQUEST_TOKEN_CHARS, max_length=MAX_PIN_NAME)]


class Pinned(Wire, frozen=True, tag=24):
    """The request has `chunks` whole chunks of `chunk_size` tokens. The server has objects of `held` of them,
    and can restore the first `resume_tokens` tokens. All are 0 while the request has not ended."""

    chunks: Natural
    held: Natural
    resume_tokens: Natural
    chunk_size: Natural


class Unpin(Wire, frozen=True, tag=25):
    """Ends the pins of a name, or with an empty name all pins. The reply is Unpinned."""

    name: Annotated[str, Meta(max_length=MAX_PIN_NAME)]


class Unpinned(Wire, frozen=True, tag=26):
    """How many chunks no name pins any more."""

    chunks: Natural


class Accept(Wire, frozen=True, tag=29):
    """The engine uses the answers to these early lookups: their request ids, each with the tokens that the
    engine itself turned out to hold. The reply is Done."""

    lookups: Annotated[tuple[tuple[Name, Natural], ...], Meta(max_length=MAX_OBJECTS)]


Message = (
    Hello | Welcome | Register | Challenge | Prove | Registered | Join | Joined | NotCached | Lookup | Found
    | Release | Load | Store | Stored | Clear | Cleared | Status | StatusReport | Ping | Goodbye | Done
    | Refused | Pin | Pinned | Unpin | Unpinned | Inspect | Inspected | Accept | Follow | Followed
    | control.Retain
)  # fmt: skip


class BadRequestError(ProtocolError):
    """An invalid request that can be answered, or the reply of a server of another version: `code` and the
    message go into Refused."""

    def __init__(self, request_id: int, code: str, message: str) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.code = code


class _Opening(Struct, array_like=True):
    """The beginning of a frame of any version. More may follow."""

    version: Natural
    request_id: Natural


_opening, _message = codec.decoder(_Opening), codec.decoder(Message)
_request = codec.decoder(tuple[Natural, Natural, Raw])
_reply = codec.decoder(tuple[Natural, Natural, BootId, Raw])


def encode_request(request_id: int, message: Message) -> bytes:
    return codec.pack([PROTOCOL_VERSION, request_id, message])


def decode_request(frame: bytes) -> tuple[int, Message]:
    """Returns (request id, message). Raises BadRequestError, which has the request id, if only the message
    or the version is wrong, and ProtocolError if the frame does not even have a request id."""
    request_id = _opened(frame)
    try:
        return request_id, _message(_request(frame)[-1])
    except ProtocolError as error:
        raise BadRequestError(request_id, BAD_REQUEST, str(error)) from error


def request_id(frame: memoryview) -> int:
    """The id of a request of which only the first bytes are decoded. Raises ProtocolError."""
    return codec.first_numbers(bytes(frame[:HEAD_BYTES]), 2)[1]


def encode_reply(boot_id: bytes, request_id: int, message: Message) -> bytes:
    return codec.pack([PROTOCOL_VERSION, request_id, boot_id, message])


def decode_reply(frame: bytes) -> tuple[bytes, int, Message]:
    """Returns (boot id, request id, message). Raises ProtocolError, and for a server of another version
    BadRequestError."""
    request_id = _opened(frame)
    *_, boot_id, message = _reply(frame)
    return boot_id, request_id, _message(message)


def _opened(frame: bytes) -> int:
    """The id in a frame of this version, whatever follows."""
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(frame)}")
    opening = _opening(frame)
    if opening.version != PROTOCOL_VERSION:
        reason = f"the other side speaks protocol version {opening.version}, this side {PROTOCOL_VERSION}: "
        advice = "install the same version of lmcache-mp for the server and for vLLM"
        raise BadRequestError(opening.request_id, WRONG_VERSION, reason + advice)
    return int(opening.request_id)
