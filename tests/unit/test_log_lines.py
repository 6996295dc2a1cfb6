"""Each event is one line, whatever is in it, as text and as JSON."""

import io
import json
import logging
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


def json_line(message, arguments, created=0.0):
    record = logging.makeLogRecord({"name": "lmcache_server.some", "levelname": "INFO", "created": created})
    record.msg, record.args = message, arguments
    return json.loads(JsonFormatter().format(record))


def test_a_json_line_has_the_values_of_its_event_but_its_own_are_not_an_events_to_choose():
    expected = {
        **{"time": "2023-11-14T22:13:20.250Z", "level": "info", "logger": "lmcache_server.some"},
        **{"message": "7 bytes", "bytes": 7, "request_id": "r", "seconds": 0.5},
    }
    event = {"bytes": 7, "request_id": "r", "seconds": 0.5}
    assert json_line("%(bytes)d bytes", event, 1_700_000_000.25) == expected
    forged = dict.fromkeys(("level", "time", "logger", "message"), "forged")
    line = json_line("%(level)s", {**forged, "more": 1})
    assert (line["level"], line["message"], line["more"]) == ("info", "forged", 1)
    assert (line["time"], line["logger"]) == ("1970-01-01T00:00:00.000Z", "lmcache_server.some")


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
    said = ["<class 'object'> and 2", "worker ended", "MainThread ended"]
    assert [line["message"] for line in told] == said
    assert "ZeroDivisionError" in told[1]["traceback"]
    assert told[2]["traceback"].endswith("RuntimeError: the end")
