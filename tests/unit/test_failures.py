"""Recent failures: bounded, and what fails all the time leaves room for what failed once."""

from lmcache_server.telemetry.failures import MAX_FAILURES, MAX_SENTENCE, Failures


def test_what_fails_again_and_again_is_one_entry():
    failures = Failures()
    failures.add(1.0, "load failed", "engine", "first")
    for second in range(5000):
        failures.add(2.0 + second, "store dropped", "engine", f"no room {second}", count=3)
    dropped, load = failures.report(5010.0)
    assert dropped == {
        **{"what": "store dropped", "engine_id": "engine", "sentence": "no room 4999"},
        **{"count": 15000, "age_s": 9.0, "first_age_s": 5008.0},
    }
    assert (load["what"], load["count"], load["age_s"]) == ("load failed", 1, 5009.0)


def test_the_latest_come_first_the_oldest_go_and_sentences_are_bounded():
    failures = Failures()
    for number in range(MAX_FAILURES + 5):
        failures.add(float(number), "load failed", f"engine {number}", "why")
    failures.add(100.0, "load failed", "engine 7", "x" * 10_000)
    report = failures.report(100.0)
    assert len(report) == MAX_FAILURES
    assert [each["engine_id"] for each in report[:2]] == ["engine 7", f"engine {MAX_FAILURES + 4}"]
    assert "engine 4" not in {each["engine_id"] for each in report}
    assert (report[0]["count"], len(report[0]["sentence"])) == (2, MAX_SENTENCE)
