"""Each event is one line, whatever is in it, as text and as JSON."""

import io
import json
import logging
import re
import subprocess
import sys

import pytest

from lmcache_server.host.logs import JsonFormatter, TextFormatter

HOSTILE = "model\n2026-01-01 00:00:00,000 INFO forged\r\x1b[31m\x00\x85\u2028\u202e\ud800 ü"


@pytest.fixture(params=[TextFormatter, JsonFormatter])
def logged(request):
    """(logger, what it has written so far)."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(request.param())
    logger = logging.Logger("lmcache_server.some")
    logger.addHandler(handler)
    return logger, written


def test_hostile_text_stays_in_its_line(logged):
    logger, written = logged
    logger.warning("%(model)s is refused", {"model": HOSTILE})
    text = written.getvalue()
    assert len(text.splitlines()) == 1
    assert text[:-1].isprintable()
    if text.startswith("{"):
        assert json.loads(text)["model"] == HOSTILE


def test_a_traceback_begins_no_line(logged):
    logger, written = logged
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("request %(operation)s failed", {"operation": "lookup"})
    text = written.getvalue()
    first, *rest = text.splitlines()
    if text.startswith("{"):
        assert not rest
        assert json.loads(first)["traceback"].startswith("Traceback (most recent call last):\n")
        assert json.loads(first)["operation"] == "lookup"
    else:
        assert len(rest) >= 4
        assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_a_json_line_has_the_values_of_its_event():
    record = logging.makeLogRecord(
        {"name": "lmcache_server.service.copies", "levelname": "INFO", "created": 1_700_000_000.25}
    )
    record.msg, record.args = "%(bytes)d bytes", {"bytes": 7, "request_id": "r", "seconds": 0.5}
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "logger": "lmcache_server.service.copies",
        "message": "7 bytes",
        "bytes": 7,
        "request_id": "r",
        "seconds": 0.5,
    }


def test_the_fields_of_every_line_are_not_an_events_to_choose():
    record = logging.makeLogRecord({"name": "some", "levelname": "INFO", "created": 0.0})
    record.msg, record.args = "%(level)s", {"level": "forged", "message": "forged", "more": 1}
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["message"], line["more"]) == ("info", "forged", 1)
    record.args = {"level": "x", "time": "forged", "logger": "forged", "message": "forged"}
    line = json.loads(JsonFormatter().format(record))
    assert (line["time"], line["logger"], line["message"]) == ("1970-01-01T00:00:00.000Z", "some", "x")


def test_what_another_library_logs_and_a_thread_that_dies_are_lines_too():
    program = (
        "import logging, threading\n"
        "from lmcache_server.host import logs\n"
        "logs.set_up('info', 'json')\n"
        "logging.getLogger('asyncio').error('%s and %d', object, 2)\n"
        "thread = threading.Thread(target=lambda: 1 / 0, name='worker')\n"
        "thread.start()\n"
        "thread.join()\n"
        "raise RuntimeError('the end')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["message"] for line in told] == [
        "<class 'object'> and 2",
        "worker ended",
        "MainThread ended",
    ]
    assert re.search("ZeroDivisionError", told[1]["traceback"])
    assert told[2]["traceback"].endswith("RuntimeError: the end")
