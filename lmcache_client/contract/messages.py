"""Every message between the connector and the server.

A client (ZeroMQ DEALER) sends one frame: the MessagePack array [PROTOCOL_VERSION, request id, code,
fields]. The server (ROUTER) answers each with one frame [PROTOCOL_VERSION, request id, boot id, code,
fields]; a reply may overtake an earlier one. A request that fails is answered with Refused. Tokens never
travel, only keys; pages never travel, only where they are.
"""

from dataclasses import dataclass
from typing import Any, get_args

from lmcache_client.contract import codec
from lmcache_client.contract.codec import ProtocolError
from lmcache_client.contract.geometry import Geometry
from lmcache_client.contract.keys import KEY_BYTES, ModelTag

PROTOCOL_VERSION = 5
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

# Codes of Refused. A client acts on the code and shows the message.
BAD_REQUEST = "bad_request"
WRONG_VERSION = "wrong_version"
NOT_REGISTERED = "not_registered"
CONFIGURATION = "configuration"
NO_ACCESS = "no_access"
EXPIRED = "expired"
COPY_FAILED = "copy_failed"
OVERLOADED = "overloaded"
INTERNAL = "internal"


def _check_keys(keys: tuple[bytes, ...]) -> None:
    if len(keys) > MAX_CHUNKS or (keys and set(map(len, keys)) != {KEY_BYTES}):
        raise ProtocolError(f"at most {MAX_CHUNKS} keys of {KEY_BYTES} bytes each")


@dataclass(frozen=True)
class Hello:
    """The first message of a session. `pid` is the client's, as it sees itself; `client_id` is random and
    stays over reconnections: a session that comes again ends the one before, and its copies, first."""

    pid: int
    client_id: bytes
    client_version: str

    def __post_init__(self) -> None:
        if len(self.client_id) != CLIENT_ID_BYTES or len(self.client_version) > MAX_NAME:
            raise ProtocolError(
                f"a client id has {CLIENT_ID_BYTES} bytes, a version up to {MAX_NAME} letters"
            )


@dataclass(frozen=True)
class Welcome:
    """`server_pid` is whom the client must allow to trace it (Yama). `session_id` names the session.
    A reply with another boot id than `boot_id` comes from another life of the server."""

    boot_id: bytes
    server_pid: int
    server_version: str
    session_id: int


@dataclass(frozen=True)
class Memory:
    """Where the pages of process `pid` are, as ranges (start, bytes).

    On a CPU they start at addresses, and NONCE_BYTES at `proof_address` are for the nonce. On the GPU with
    the UUID `device` each counts from the first byte of the allocation that has the raw memory handle of
    the same position in `handles`, and the nonce is for the first bytes of every range.
    """

    pid: int
    buffers: tuple[tuple[int, int], ...]
    proof_address: int
    device: bytes = b""
    handles: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if len(self.buffers) > MAX_BUFFERS or not all(size for _, size in self.buffers):
            raise ProtocolError(f"at most {MAX_BUFFERS} buffers, none of them empty")
        if self.device and (len(self.device) != UUID_BYTES or len(self.handles) != len(self.buffers)):
            raise ProtocolError(f"a GPU has a UUID of {UUID_BYTES} bytes and each of its buffers a handle")
        if any(len(handle) != HANDLE_BYTES for handle in self.handles):
            raise ProtocolError(f"a memory handle has {HANDLE_BYTES} bytes")
        if self.device and any(size < NONCE_BYTES for _, size in self.buffers):
            raise ProtocolError(f"a buffer on a GPU has at least {NONCE_BYTES} bytes")


@dataclass(frozen=True)
class Register:
    """A worker hands over handles to its KV cache memory. Answered with Challenge.

    What an `ephemeral` engine stores is forgotten when the last engine of its namespace is gone, and only
    ephemeral engines share that namespace.
    """

    engine_id: str
    rank: int
    model: ModelTag
    geometry: Geometry
    memory: Memory
    ephemeral: bool = False

    def __post_init__(self) -> None:
        if len(self.engine_id) > MAX_NAME:
            raise ProtocolError(f"an engine id has at most {MAX_NAME} characters")


@dataclass(frozen=True)
class Challenge:
    """The client writes `nonce` where its memory says, then sends Prove. No byte of it has one of its two
    high bits: as a number of any format that KV caches have, it is finite and small."""

    nonce: bytes


@dataclass(frozen=True)
class Prove:
    """Answered with Registered once the server has mapped the client's memory and read the nonce there."""


@dataclass(frozen=True)
class Registered:
    chunk_size: int
    warning: str


@dataclass(frozen=True)
class Join:
    """The scheduler side asks after its engine."""

    engine_id: str


@dataclass(frozen=True)
class Joined:
    """`ready` once every worker of the engine has registered; else the rest means nothing yet."""

    ready: bool
    chunk_size: int
    namespace: bytes


@dataclass(frozen=True)
class NotCached:
    """An engine that does not use the cache says why: "it has `reason`". Answered with Done."""

    engine_id: str
    model: str
    vllm_version: str
    reason: str

    def __post_init__(self) -> None:
        longest = max(map(len, (self.engine_id, self.model, self.vllm_version)))
        if longest > MAX_NAME or len(self.reason) > MAX_REASON:
            raise ProtocolError(f"a name has at most {MAX_NAME} characters, a reason {MAX_REASON}")


@dataclass(frozen=True)
class Lookup:
    """Up to where can this chain of chunks be restored?

    `computed_tokens` are what the engine holds itself, a multiple of the unified block size; `limit_tokens`
    is the largest resume point of use, a multiple of the chunk size below `num_tokens`, the request's length.
    """

    engine_id: str
    request_id: str
    keys: tuple[bytes, ...]
    computed_tokens: int
    limit_tokens: int
    num_tokens: int

    def __post_init__(self) -> None:
        _check_keys(self.keys)


@dataclass(frozen=True)
class Found:
    """`resume_tokens` is 0 when the server has nothing beyond what the engine computed; else `lease_id` keeps
    it restorable for `lease_s`. `held`: a bitmap per group, lowest bit first, of chunks all shards have."""

    resume_tokens: int
    lease_id: int
    lease_s: int
    held: tuple[bytes, ...]


@dataclass(frozen=True)
class EndRequest:
    """A request is over: its leases end, its chunks are touched (recently used). `request_id` is for the
    debug log alone, and empty when the request goes on and only gives its leases up."""

    engine_id: str
    lease_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    request_id: str = ""

    def __post_init__(self) -> None:
        _check_keys(self.keys)
        if len(self.lease_ids) > MAX_LEASES:
            raise ProtocolError(f"at most {MAX_LEASES} leases, not {len(self.lease_ids)}")


@dataclass(frozen=True)
class Retrieve:
    """Copy pages into the worker's blocks: for each group the ids of the blocks at
    `needed_blocks(resume_tokens, computed_tokens)`. Answered with Done when the bytes are there.

    `key` is that of the chunk which ends at the resume point: the number of a lease may have come from
    another life of the server, the key says what was meant.
    """

    request_id: str
    lease_id: int
    key: bytes
    resume_tokens: int
    computed_tokens: int
    block_ids: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _check_keys((self.key,))


@dataclass(frozen=True)
class StoreObject:
    """One object: the ids of the blocks at `stored_blocks(chunk_index, chunk_size)` of the group.
    `parent` is the key of the chunk before it (ROOT_KEY for the first), by which it is evicted earlier."""

    key: bytes
    parent: bytes
    chunk_index: int
    group: int
    block_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_keys((self.key, self.parent))


@dataclass(frozen=True)
class Store:
    """Copy pages out of the worker's blocks. The blocks must not change until Stored has come.
    `request_ids` are those whose chunks these are, for the debug log alone."""

    objects: tuple[StoreObject, ...]
    request_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.objects) > MAX_OBJECTS or len(self.request_ids) > len(self.objects):
            raise ProtocolError(f"at most {MAX_OBJECTS} objects, and no more requests than objects")


@dataclass(frozen=True)
class Stored:
    """How many objects were stored, were there already (or being written), and were dropped."""

    stored: int
    present: int
    dropped: int


@dataclass(frozen=True)
class Clear:
    """Forget everything that nobody is using."""


@dataclass(frozen=True)
class Cleared:
    chunks: int


@dataclass(frozen=True)
class Status:
    """What does the server hold?"""


@dataclass(frozen=True)
class StatusReport:
    """A JSON object, the same as the HTTP endpoint /status gives; in pieces of at most MAX_TEXT."""

    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Ping:
    pass


@dataclass(frozen=True)
class Goodbye:
    """The session ends; answered when none of its memory is mapped or being copied."""


@dataclass(frozen=True)
class Done:
    pass


@dataclass(frozen=True)
class Refused:
    """`code` is one of the constants above; `message` is a sentence that says what to do."""

    code: str
    message: str


Message = (
    Hello | Welcome | Register | Challenge | Prove | Registered | Join | Joined | NotCached | Lookup | Found
    | EndRequest | Retrieve | Store | Stored | Clear | Cleared | Status | StatusReport | Ping | Goodbye | Done
    | Refused
)  # fmt: skip

_TYPES: tuple[type[Any], ...] = get_args(Message)
_CODES = {cls: code for code, cls in enumerate(_TYPES)}


class BadRequestError(ProtocolError):
    """A request that cannot be understood, but answered: `code` and the message go into Refused."""

    def __init__(self, request_id: int, code: str, message: str) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.code = code


def encode_request(request_id: int, message: Message) -> bytes:
    return codec.pack([PROTOCOL_VERSION, request_id, _CODES[type(message)], codec.to_fields(message)])


def decode_request(frame: bytes) -> tuple[int, Message]:
    """(request id, message). Raises BadRequestError, which knows the request id, when only the message
    or the version is wrong, and ProtocolError when not even an answer can be addressed."""
    version, request_id, *rest = _open(frame)
    if version != PROTOCOL_VERSION:
        raise BadRequestError(request_id, WRONG_VERSION, _version_sentence(version))
    try:
        code, fields = _exactly(2, rest)
        return request_id, _message(code, fields)
    except ProtocolError as error:
        raise BadRequestError(request_id, BAD_REQUEST, str(error)) from error


def encode_reply(boot_id: bytes, request_id: int, message: Message) -> bytes:
    return codec.pack(
        [PROTOCOL_VERSION, request_id, boot_id, _CODES[type(message)], codec.to_fields(message)]
    )


def decode_reply(frame: bytes) -> tuple[bytes, int, Message]:
    """(boot id, request id, message); raises ProtocolError."""
    version, request_id, *rest = _open(frame)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(_version_sentence(version))
    boot_id, code, fields = _exactly(3, rest)
    if type(boot_id) is not bytes or len(boot_id) != BOOT_ID_BYTES:
        raise ProtocolError("a reply carries a boot id")
    return boot_id, request_id, _message(code, fields)


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


def _message(code: Any, fields: Any) -> Message:
    if type(code) is not int or not 0 <= code < len(_TYPES):
        raise ProtocolError(f"unknown message code {code!r}")
    message: Message = codec.from_fields(_TYPES[code], fields)
    return message
