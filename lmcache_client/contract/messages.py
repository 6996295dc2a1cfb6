"""Every message between the connector and the server.

A client (ZeroMQ DEALER) sends one frame: the MessagePack array [PROTOCOL_VERSION, request id, message].
The server (ROUTER) answers each with one frame [PROTOCOL_VERSION, request id, boot id, message]; a reply may
overtake an earlier one. A message is the array of its code, which is the number in its class, and its fields.
A request that fails is answered with Refused. Tokens never travel, only keys; pages never travel, only where
they are.
"""

from typing import Annotated, Any

from msgspec import Meta

from lmcache_client.contract import codec
from lmcache_client.contract.codec import Natural, ProtocolError, Wire
from lmcache_client.contract.geometry import Geometry
from lmcache_client.contract.keys import Key, ModelTag

PROTOCOL_VERSION = 6
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

# Codes of Refused. A client acts on the code and shows the message.
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
    """The first message of a session. `pid` is the client's, as it sees itself; `client_id` is random and
    stays over reconnections: a session that comes again ends the one before, and its copies, first."""

    pid: Natural
    client_id: Annotated[bytes, Meta(min_length=CLIENT_ID_BYTES, max_length=CLIENT_ID_BYTES)]
    client_version: Name


class Welcome(Wire, frozen=True, tag=1):
    """`server_pid` is whom the client must allow to trace it (Yama). `session_id` names the session.
    A reply with another boot id than `boot_id` comes from another life of the server."""

    boot_id: bytes
    server_pid: Natural
    server_version: str
    session_id: Natural


class Memory(Wire, frozen=True):
    """Where the pages of process `pid` are, as ranges (start, bytes).

    On a CPU they start at addresses, and NONCE_BYTES at `proof_address` are for the nonce. On the GPU with
    the UUID `device` each counts from the first byte of the allocation that has the raw memory handle of
    the same position in `handles`, and the nonce is for the first bytes of every range.
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
    """A worker hands over handles to its KV cache memory. Answered with Challenge.

    What an `ephemeral` engine stores is forgotten when the last engine of its namespace is gone, and only
    ephemeral engines share that namespace.
    """

    engine_id: Name
    rank: Natural
    model: ModelTag
    geometry: Geometry
    memory: Memory
    ephemeral: bool = False


class Challenge(Wire, frozen=True, tag=3):
    """The client writes `nonce` where its memory says, then sends Prove. No byte of it has one of its two
    high bits: as a number of any format that KV caches have, it is finite and small."""

    nonce: bytes


class Prove(Wire, frozen=True, tag=4):
    """Answered with Registered once the server has mapped the client's memory and read the nonce there."""


class Registered(Wire, frozen=True, tag=5):
    chunk_size: Natural
    warning: str


class Join(Wire, frozen=True, tag=6):
    """The scheduler side asks after its engine."""

    engine_id: str


class Joined(Wire, frozen=True, tag=7):
    """`ready` once every worker of the engine has registered; else the chunk size means nothing yet."""

    ready: bool
    chunk_size: Natural


class NotCached(Wire, frozen=True, tag=8):
    """An engine that does not use the cache says why: "it has `reason`". Answered with Done."""

    engine_id: Name
    model: Name
    vllm_version: Name
    reason: Annotated[str, Meta(max_length=MAX_REASON)]


class Lookup(Wire, frozen=True, tag=9):
    """Up to where can this chain of chunks be restored?

    `computed_tokens` are what the engine holds itself, a multiple of the unified block size; `limit_tokens`
    is the largest resume point of use, a multiple of the chunk size below `num_tokens`, the request's length.
    """

    request_id: str
    keys: Keys
    computed_tokens: Natural
    limit_tokens: Natural
    num_tokens: Natural


class Found(Wire, frozen=True, tag=10):
    """`resume_tokens` is 0 when the server has nothing beyond what the engine computed; else `lease_id` keeps
    it restorable for `lease_s`. `held`: a bitmap per group, lowest bit first, of chunks all shards have."""

    resume_tokens: Natural
    lease_id: Natural
    lease_s: Natural
    held: tuple[bytes, ...]


class Release(Wire, frozen=True, tag=11):
    """A request is over: its leases end, its chunks are touched (recently used). `request_id` is for the
    debug log alone, and empty when the request goes on and only gives its leases up."""

    lease_ids: Annotated[tuple[Natural, ...], Meta(max_length=MAX_LEASES)]
    keys: Keys
    request_id: str = ""


class Load(Wire, frozen=True, tag=12):
    """Copy pages into the worker's blocks: for each group the ids of the blocks at
    `needed_blocks(resume_tokens, computed_tokens)`. Answered with Done when the bytes are there.

    `key` is that of the chunk which ends at the resume point: the number of a lease may have come from
    another life of the server, the key says what was meant.
    """

    request_id: str
    lease_id: Natural
    key: Key
    resume_tokens: Natural
    computed_tokens: Natural
    block_ids: tuple[BlockIds, ...]


class StoreObject(Wire, frozen=True):
    """One object: the ids of the blocks at `stored_blocks(chunk_index, chunk_size)` of the group.
    `parent` is the key of the chunk before it (ROOT_KEY for the first), by which it is evicted earlier."""

    key: Key
    parent: Key
    chunk_index: Natural
    group: Natural
    block_ids: BlockIds


class Store(Wire, frozen=True, tag=13):
    """Copy pages out of the worker's blocks. The blocks must not change until Stored has come.
    `request_ids` are those whose chunks these are, for the debug log alone."""

    objects: Annotated[tuple[StoreObject, ...], Meta(max_length=MAX_OBJECTS)]
    request_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.request_ids) > len(self.objects):
            raise ProtocolError("no more requests than objects")


class Stored(Wire, frozen=True, tag=14):
    """How many objects were stored, were there already (or being written), and were dropped."""

    stored: Natural
    present: Natural
    dropped: Natural


class Clear(Wire, frozen=True, tag=15):
    """Forget everything that nobody is using."""


class Cleared(Wire, frozen=True, tag=16):
    chunks: Natural


class Status(Wire, frozen=True, tag=17):
    """What does the server hold?"""


class StatusReport(Wire, frozen=True, tag=18):
    """A JSON object, the same as the HTTP endpoint /status gives; in pieces of at most MAX_TEXT."""

    pieces: tuple[str, ...]


class Ping(Wire, frozen=True, tag=19):
    pass


class Goodbye(Wire, frozen=True, tag=20):
    """The session ends; answered when none of its memory is mapped or being copied."""


class Done(Wire, frozen=True, tag=21):
    pass


class Refused(Wire, frozen=True, tag=22):
    """`code` is one of the constants above; `message` is a sentence that says what to do."""

    code: str
    message: str


Message = (
    Hello | Welcome | Register | Challenge | Prove | Registered | Join | Joined | NotCached | Lookup | Found
    | Release | Load | Store | Stored | Clear | Cleared | Status | StatusReport | Ping | Goodbye | Done
    | Refused
)  # fmt: skip


class BadRequestError(ProtocolError):
    """A request that cannot be understood, but answered: `code` and the message go into Refused."""

    def __init__(self, request_id: int, code: str, message: str) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.code = code


def encode_request(request_id: int, message: Message) -> bytes:
    return codec.pack([PROTOCOL_VERSION, request_id, message])


def decode_request(frame: bytes) -> tuple[int, Message]:
    """(request id, message). Raises BadRequestError, which knows the request id, when only the message
    or the version is wrong, and ProtocolError when not even an answer can be addressed."""
    version, request_id, *rest = _open(frame)
    if version != PROTOCOL_VERSION:
        raise BadRequestError(request_id, WRONG_VERSION, _version_sentence(version))
    try:
        (plain,) = _exactly(1, rest)
        return request_id, codec.build(Message, plain)
    except ProtocolError as error:
        raise BadRequestError(request_id, BAD_REQUEST, str(error)) from error


def encode_reply(boot_id: bytes, request_id: int, message: Message) -> bytes:
    return codec.pack([PROTOCOL_VERSION, request_id, boot_id, message])


def decode_reply(frame: bytes) -> tuple[bytes, int, Message]:
    """(boot id, request id, message); raises ProtocolError."""
    version, request_id, *rest = _open(frame)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(_version_sentence(version))
    boot_id, plain = _exactly(2, rest)
    if type(boot_id) is not bytes or len(boot_id) != BOOT_ID_BYTES:
        raise ProtocolError("a reply carries a boot id")
    return boot_id, request_id, codec.build(Message, plain)


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


def _version_sentence(version: int) -> str:
    return (
        f"the other side speaks protocol version {version}, this side {PROTOCOL_VERSION}: "
        "install the same version of lmcache-mp for the server and for vLLM"
    )
