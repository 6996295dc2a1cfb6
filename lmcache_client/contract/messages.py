"""All messages between the connector and the server.

A client (ZeroMQ DEALER) sends one frame: the MessagePack array [PROTOCOL_VERSION, request id, message].
The server (ROUTER) answers it with one frame [PROTOCOL_VERSION, request id, boot id, message]; a reply may
overtake an earlier one. A message is an array of its code, which is the `tag` of its class, and its fields.
If a request fails, the reply is Refused. Messages carry keys, never tokens, and the locations of pages, never
their contents.
"""

from typing import Annotated, Any, get_args

from msgspec import Meta

from lmcache_client.contract import codec
from lmcache_client.contract.codec import Natural, ProtocolError, Wire
from lmcache_client.contract.geometry import Geometry
from lmcache_client.contract.keys import Key, ModelTag

PROTOCOL_VERSION = 7
DEFAULT_PORT = 5555
BOOT_ID_BYTES = 16
CLIENT_ID_BYTES = 16
NONCE_BYTES = 32
HANDLE_BYTES = 64
UUID_BYTES = 16
MAX_NAME = 256
MAX_REASON = 1024
MAX_BUFFERS = 1024
MAX_CHUNKS = 1 << 16
MAX_LEASES = 4096
MAX_OBJECTS = 4096

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_CHUNKS)]
Handle = Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
Range = tuple[Natural, Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]]
BlockIds = tuple[Natural, ...]

# The codes of Refused. A client acts on the code and shows the message.
BAD_REQUEST = "bad_request"
WRONG_VERSION = "wrong_version"
NOT_REGISTERED = "not_registered"
CONFIGURATION = "configuration"
NO_ACCESS = "no_access"
ENGINE_ID_TAKEN = "engine_id_taken"
EXPIRED = "expired"
COPY_FAILED = "copy_failed"
OVERLOADED = "overloaded"
INTERNAL = "internal"


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

    boot_id: Annotated[bytes, Meta(min_length=BOOT_ID_BYTES, max_length=BOOT_ID_BYTES)]
    server_pid: Natural
    server_version: str
    session_id: Natural


class Memory(Wire, frozen=True):
    """The ranges (start, bytes) that hold the pages of process `pid`.

    On a CPU, a start is an address, and the nonce goes to the NONCE_BYTES at `proof_address`. On a GPU,
    `device` is its UUID. Each range has a handle at the same position in `handles`; its start is an offset
    into that handle's allocation. The nonce goes to the first bytes of every range.
    """

    pid: Natural
    buffers: Annotated[tuple[Range, ...], Meta(max_length=MAX_BUFFERS)]
    proof_address: Natural
    device: bytes = b""
    handles: tuple[Handle, ...] = ()

    def __post_init__(self) -> None:
        if self.device and (len(self.device) != UUID_BYTES or len(self.handles) != len(self.buffers)):
            raise ProtocolError(f"a GPU has a UUID of {UUID_BYTES} bytes and each of its buffers a handle")
        if self.device and any(size < NONCE_BYTES for _, size in self.buffers):
            raise ProtocolError(f"a buffer on a GPU has at least {NONCE_BYTES} bytes")


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
    warning: str


class Join(Wire, frozen=True, tag=6):
    """The scheduler side asks whether its engine is registered."""

    engine_id: str


class Joined(Wire, frozen=True, tag=7):
    """`ready` says that every worker of the engine has registered; until then `chunk_size` means nothing."""

    ready: bool
    chunk_size: Natural


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
    """

    request_id: str
    keys: Keys
    computed_tokens: Natural
    limit_tokens: Natural
    num_tokens: Natural


class Found(Wire, frozen=True, tag=10):
    """`resume_tokens` is 0 if the server has nothing beyond the computed tokens; otherwise the lease
    `lease_id` keeps the tokens up to there restorable for `lease_s` seconds. `held` has a bitmap per group,
    lowest bit first, of the chunks that all shards have."""

    resume_tokens: Natural
    lease_id: Natural
    lease_s: Natural
    held: tuple[bytes, ...]


class Release(Wire, frozen=True, tag=11):
    """Ends leases and marks the chunks of `keys` as recently used. `request_id` only serves the debug log; it
    is empty if the request itself goes on."""

    lease_ids: Annotated[tuple[Natural, ...], Meta(max_length=MAX_LEASES)]
    keys: Keys
    request_id: str = ""


class Load(Wire, frozen=True, tag=12):
    """Copies pages into the worker's blocks. `block_ids` has, for each group, the blocks at the positions
    `needed_blocks(resume_tokens, computed_tokens)`. The reply is Done when the bytes have arrived.

    `key` belongs to the chunk that ends at the resume point. It confirms the lease, whose number may be from
    before a restart of the server.
    """

    request_id: str
    lease_id: Natural
    key: Key
    resume_tokens: Natural
    computed_tokens: Natural
    block_ids: tuple[BlockIds, ...]


class StoreObject(Wire, frozen=True):
    """One object: the ids of the group's blocks at the positions `stored_blocks(chunk_index, chunk_size)`.
    `parent` is the key of the previous chunk (or ROOT_KEY), which is evicted later than this one."""

    key: Key
    parent: Key
    chunk_index: Natural
    group: Natural
    block_ids: BlockIds


class Store(Wire, frozen=True, tag=13):
    """Copies pages out of the worker's blocks, which must not change before the reply, Stored.
    `request_ids` names the requests that the chunks belong to and only serves the debug log. `once` says that
    their prompts will not come back: the server first evicts the chunks that only such prompts have
    brought."""

    objects: Annotated[tuple[StoreObject, ...], Meta(max_length=MAX_OBJECTS)]
    request_ids: tuple[str, ...] = ()
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
    """Asks the server to forget the chunks of the scheduler's namespace. With `everything`, which `lmcache
    clear` sends, it forgets all chunks. A chunk that is in use keeps its frames until its use ends."""

    everything: bool = False


class Cleared(Wire, frozen=True, tag=16):
    chunks: Natural


class Status(Wire, frozen=True, tag=17):
    """Asks what the server holds."""


class StatusReport(Wire, frozen=True, tag=18):
    """The JSON object that the HTTP endpoint /status returns, in pieces of at most MAX_TEXT."""

    pieces: tuple[str, ...]


class Ping(Wire, frozen=True, tag=19):
    """Answered with Done. With a `session_id` it is refused as not_registered if that session has ended."""

    session_id: Natural = 0


class Goodbye(Wire, frozen=True, tag=20):
    """Ends the session. The reply is Done when none of its memory is mapped or being copied."""


class Done(Wire, frozen=True, tag=21):
    pass


class Refused(Wire, frozen=True, tag=22):
    """`code` is one of the constants above; `message` tells the user what to do."""

    code: str
    message: str


Message = (
    Hello | Welcome | Register | Challenge | Prove | Registered | Join | Joined | NotCached | Lookup | Found
    | Release | Load | Store | Stored | Clear | Cleared | Status | StatusReport | Ping | Goodbye | Done
    | Refused
)  # fmt: skip


class BadRequestError(ProtocolError):
    """An invalid request that can be answered, or the reply of a server of another version: `code` and the
    message go into Refused."""

    def __init__(self, request_id: int, code: str, message: str) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.code = code


def encode_request(request_id: int, message: Message) -> bytes:
    return codec.pack([PROTOCOL_VERSION, request_id, message])


def decode_request(frame: bytes) -> tuple[int, Message]:
    """Returns (request id, message). Raises BadRequestError, which has the request id, if only the message
    or the version is wrong, and ProtocolError if the frame does not even have a request id."""
    version, request_id, *rest = _open(frame)
    if version != PROTOCOL_VERSION:
        raise BadRequestError(request_id, WRONG_VERSION, _version_mismatch(version))
    try:
        (plain,) = _exactly(1, rest)
        return request_id, _message(plain)
    except ProtocolError as error:
        raise BadRequestError(request_id, BAD_REQUEST, str(error)) from error


def encode_reply(boot_id: bytes, request_id: int, message: Message) -> bytes:
    return codec.pack([PROTOCOL_VERSION, request_id, boot_id, message])


def decode_reply(frame: bytes) -> tuple[bytes, int, Message]:
    """Returns (boot id, request id, message). Raises ProtocolError, and for a server of another version
    BadRequestError."""
    version, request_id, *rest = _open(frame)
    if version != PROTOCOL_VERSION:
        raise BadRequestError(request_id, WRONG_VERSION, _version_mismatch(version))
    boot_id, plain = _exactly(2, rest)
    if type(boot_id) is not bytes or len(boot_id) != BOOT_ID_BYTES:
        raise ProtocolError("a reply carries a boot id")
    return boot_id, request_id, _message(plain)


def _open(frame: bytes) -> list[Any]:
    envelope = codec.unpack(frame)
    if not isinstance(envelope, list) or len(envelope) < 2:
        raise ProtocolError("not an lmcache-mp message")
    for number in envelope[:2]:
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ProtocolError("not an lmcache-mp message")
    return envelope


def _exactly(count: int, rest: list[Any]) -> list[Any]:
    if len(rest) != count:
        raise ProtocolError(f"expected {count + 2} parts, got {len(rest) + 2}")
    return rest


def _version_mismatch(version: int) -> str:
    return (
        f"the other side speaks protocol version {version}, this side {PROTOCOL_VERSION}: "
        "install the same version of lmcache-mp for the server and for vLLM"
    )


_KINDS: dict[Any, Any] = {kind.__struct_config__.tag: kind for kind in get_args(Message)}


def _message(plain: Any) -> Message:
    # msgspec could choose the type itself, but it would rebuild its table of 23 types for every message.
    code = plain[0] if type(plain) is list and plain else None
    if type(code) is not int or code not in _KINDS:
        raise ProtocolError(f"unknown message code {code!r:.40}")
    message: Message = codec.build(_KINDS[code], plain)
    return message
