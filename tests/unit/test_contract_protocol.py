"""Messages: what goes in comes out, and what is no message is refused, never guessed at."""

import contextlib
import tracemalloc
import typing

import msgpack
import msgspec
import pytest
from harness.hostile import EXAMPLES

from lmcache_client.contract import codec
from lmcache_client.contract import messages as wire
from lmcache_client.contract.codec import ProtocolError, packed
from lmcache_client.contract.geometry import Geometry, GroupSpec, Region
from lmcache_client.contract.keys import MAX_CHUNKS, MAX_DETAILS, ROOT_KEY, ModelTag
from lmcache_client.contract.messages import Release, Store, decode_request, encode_request

MESSAGES = typing.get_args(wire.Message)
BOOT_ID = bytes(range(wire.BOOT_ID_BYTES))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_requests_and_replies_survive_the_wire(message):
    for request_id in (0, 2**63 - 1):
        assert decode_request(encode_request(request_id, message)) == (request_id, message)
        reply = wire.encode_reply(BOOT_ID, request_id, message)
        assert wire.decode_reply(reply) == (BOOT_ID, request_id, message)


def test_every_message_has_a_code_of_its_own():
    codes = [message.__struct_config__.tag for message in MESSAGES]
    assert codes == sorted(set(codes))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([MESSAGES.index(wire.Done), 1], "at most length 0"),
        (None, "Expected `array`, got `None`"),
        ([], "Expected `array` of at least length 1"),
        ([MESSAGES.index(wire.Refused), "a", 1], "Expected `str`, got `int`"),
        ([MESSAGES.index(wire.Load), "r", -1, ROOT_KEY, 0, 0, []], "Expected `int` >= 0"),
        ([MESSAGES.index(Release), [], [b"short"]], "`bytes` of length >= 32"),
        ([MESSAGES.index(wire.Pin), b"name", "r" * 16], "Expected `str`, got `bytes`"),
        ([MESSAGES.index(wire.Pin), "n" * 65, "r" * 16], "`str` of length <= 64"),
        ([MESSAGES.index(wire.Pin), "name", "r" * 15], "`str` of length >= 16"),
        ([MESSAGES.index(wire.Pin), "name", "r" * 65], "`str` of length <= 64"),
        ([MESSAGES.index(wire.Unpin), "n" * 65], "`str` of length <= 64"),
        ([99], "Invalid value 99"),
        ([True], "Expected `int`"),
        (["Ping"], "Expected `int`"),
    ],
)
def test_a_bad_request_is_answered_with_what_is_wrong(content, message):
    with pytest.raises(wire.BadRequestError, match=message) as caught:
        decode_request(codec.pack([wire.PROTOCOL_VERSION, 9, content]))
    assert (caught.value.request_id, caught.value.code) == (9, wire.BAD_REQUEST)


def test_another_version_is_told_apart_whatever_follows():
    for rest in ([], [0, []]):
        frame = msgpack.packb([wire.PROTOCOL_VERSION + 1, 3, *rest])
        with pytest.raises(wire.BadRequestError, match="install the same version") as caught:
            decode_request(frame)
        assert (caught.value.request_id, caught.value.code) == (3, wire.WRONG_VERSION)
        with pytest.raises(ProtocolError, match="install the same version"):
            wire.decode_reply(frame)
    with pytest.raises(ProtocolError):
        decode_request(msgpack.packb([wire.PROTOCOL_VERSION + 1, 3, b"new", {}, 1]))


def test_an_envelope_that_is_wrong_is_refused_and_answered_only_if_it_can_be():
    version = wire.PROTOCOL_VERSION
    for envelope in (
        *(7, [], [version], [-1, 1, 0, []], [True, 1, 0, []]),
        *([version, "1", 0, []], [version, 1 << 63, 0, []]),
    ):
        with pytest.raises(ProtocolError) as caught:
            decode_request(codec.pack(envelope))
        assert not isinstance(caught.value, wire.BadRequestError), envelope
    for rest in ([], [[19], 0]):
        with pytest.raises(wire.BadRequestError, match="`array` of length 3"):
            decode_request(codec.pack([version, 1, *rest]))
    for boot_id in (b"", BOOT_ID[:-1], BOOT_ID + b"\0", "x" * 16, None):
        with pytest.raises(ProtocolError, match=r"`bytes`.* - at `\$\[2\]"):
            wire.decode_reply(codec.pack([version, 1, boot_id, [MESSAGES.index(wire.Ping)]]))


def test_every_text_of_a_message_has_a_bound():
    """A server keeps some of them for a while, such as the ids of requests."""
    seen, waiting = [], [msgspec.inspect.type_info(message) for message in MESSAGES]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, msgspec.inspect.StructType):
            waiting += [field.type for field in kind.fields]
        elif isinstance(kind, msgspec.inspect.VarTupleType):
            waiting.append(kind.item_type)
        elif isinstance(kind, msgspec.inspect.TupleType):
            waiting += kind.item_types
        elif isinstance(kind, msgspec.inspect.StrType):
            seen.append(kind.max_length)
        else:
            plain = msgspec.inspect.IntType | msgspec.inspect.BoolType | msgspec.inspect.BytesType
            assert isinstance(kind, plain), kind
    assert len(seen) > 20
    assert None not in seen


def test_a_message_takes_little_more_memory_than_its_bound():
    """The worst that fits: arrays that are empty, numbers that are objects, texts of two characters."""
    load = [MESSAGES.index(wire.Load), "r", 1, ROOT_KEY, 0, 0]
    empty, numbers = [[]] * (codec.MAX_MESSAGE_BYTES - 99), [1 << 15] * (codec.MAX_MESSAGE_BYTES // 3 - 33)
    maps = [{(number,): 0 for number in range(1 << 19)}]
    texts = [MESSAGES.index(Store), [], ["ab"] * 1_390_000]
    for worst in (*([*load, each] for each in (empty, [empty], [numbers], maps)), texts, empty):
        frame = msgpack.packb([wire.PROTOCOL_VERSION, 9, worst])
        assert len(frame) <= codec.MAX_MESSAGE_BYTES
        tracemalloc.start()
        with contextlib.suppress(wire.BadRequestError):
            decode_request(frame)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 120 << 20


def test_what_is_longer_than_a_message_is_not_read():
    load = wire.Load("r", 1, ROOT_KEY, 0, 0, (bytes(codec.MAX_MESSAGE_BYTES - 99),))
    assert decode_request(encode_request(1, load)) == (1, load)
    longer = wire.Load("r", 1, ROOT_KEY, 0, 0, (bytes(codec.MAX_MESSAGE_BYTES),))
    for read, frame in (
        (decode_request, encode_request(1, longer)),
        (wire.decode_reply, wire.encode_reply(BOOT_ID, 1, longer)),
    ):
        with pytest.raises(ProtocolError, match="has at most 4194304 bytes") as caught:
            read(frame)
        assert not isinstance(caught.value, wire.BadRequestError)


def test_keys_are_counted_and_measured():
    decode_request(encode_request(1, Release((), (bytes(32),) * MAX_CHUNKS)))
    for bad in ((bytes(32),) * (MAX_CHUNKS + 1), (bytes(31),), (bytes(33),), (b"",)):
        with pytest.raises(wire.BadRequestError, match="of length"):
            decode_request(encode_request(1, Release((), bad)))
    for bad_object in (
        wire.StoreObject(b"short", ROOT_KEY, 0, 0, b""),
        wire.StoreObject(ROOT_KEY, b"short", 0, 0, b""),
    ):
        with pytest.raises(wire.BadRequestError, match="of length >= 32"):
            decode_request(encode_request(1, Store((bad_object,))))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Store((wire.StoreObject(ROOT_KEY, ROOT_KEY, 0, 0, b""),) * (wire.MAX_OBJECTS + 1)), "<= 4096"),
        (Store((wire.StoreObject(ROOT_KEY, ROOT_KEY, 0, 0, b"", bytes(17)),)), "<= 16"),
        (Release((1,) * (wire.MAX_LEASES + 1), ()), "<= 4096"),
        (wire.Memory(1, ((1, 1),) * (wire.MAX_BUFFERS + 1), 1), "<= 1024"),
        (wire.Memory(1, ((1, 1), (1, 0)), 1), ">= 1"),
        (wire.Memory(1, ((1, 99),), 1, bytes(16), (b"short",)), ">= 64"),
        (wire.Memory(1, ((1, 99),), 1, bytes(16), descriptors=((1 << 31, 100),)), "<= 2147483647"),
        (wire.Memory(1, ((1, 99),), 1, bytes(16), descriptors=((-1, 100),)), ">= 0"),
        (ModelTag("m" * 4097, (), 1, 1), "<= 4096"),
        (ModelTag("m", (("n", "v" * 4097),), 1, 1), "<= 4096"),
        (ModelTag("m", (("n", "v"),) * (MAX_DETAILS + 1), 1, 1), "<= 512"),
    ],
)
def test_what_a_message_may_hold_is_bounded(value, message):
    with pytest.raises(ProtocolError, match=f"of length {message}|`int` {message}"):
        codec.decoder(type(value))(codec.pack(value))


@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        ({"descriptors": ((3, 199),)}, "beyond the allocation"),
        ({"descriptors": ((3, 1),)}, "beyond the allocation"),
        ({"descriptors": ((3, 200), (4, 200))}, "each of its buffers a handle"),
        ({"handles": (bytes(64),)}, "no other handles"),
        ({"device": b""}, "only a GPU has"),
    ],
)
def test_a_worker_shares_whole_allocations_by_one_kind_of_handle(lie, sentence):
    honest = {"device": bytes(16), "descriptors": ((3, 200),)}
    wire.Memory(1, ((100, 100),), 0, **honest)
    with pytest.raises(ProtocolError, match=sentence):
        wire.Memory(1, ((100, 100),), 0, **{**honest, **lie})


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ProtocolError, match="no more requests than objects"):
        Store((), ("request",))
    with pytest.raises(ProtocolError, match="a group's kind is one of"):
        codec.decoder(GroupSpec)(codec.pack(["linear", 16, 0, "", [[0, 0, 1, 1]], False]))


def test_the_largest_legitimate_messages_fit():
    """A prompt of 65,536 chunks; a load of a million blocks; a model of 100 layers in 4 groups with K
    and V apart; the most objects that the connector puts in one store."""
    regions = tuple(Region(0, 1 << 40, 1 << 30, 1 << 20) for _ in range(200))
    register = wire.Register(
        "e" * 256,
        7,
        ModelTag("m" * 200, (("configuration", "c" * 64),) * 9, 8, 1),
        Geometry((GroupSpec("full", 16, 0, "t" * 8000, regions),) * 4, 1 << 20),
        wire.Memory(1 << 22, ((1 << 46, 1 << 40),) * 100, 1 << 46),
    )
    chain = (bytes(32),) * MAX_CHUNKS
    ids = packed((1 << 20,))
    each = wire.StoreObject(bytes(32), bytes(32), MAX_CHUNKS - 1, 3, 64 * ids, bytes(16))
    for message in (
        register,
        wire.Lookup("r", chain, 0, 0, 1),
        Release((1,), chain),
        wire.Load("r", 1, bytes(32), 1 << 23, 0, (1_000_000 * ids, 20_000 * ids)),
        Store((each,) * wire.MAX_OBJECTS, ("r" * 256,) * wire.MAX_OBJECTS),
    ):
        frame = encode_request(1, message)
        assert len(frame) <= codec.MAX_MESSAGE_BYTES
        assert decode_request(frame) == (1, message)
