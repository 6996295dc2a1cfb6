"""What `lmcache verify` prints."""

from lmcache_server.commands.verify.run import Result

HEADER = f"{'prompt':<16}{'tokens':>8}{'served':>8}  {'text':<8}{'logprobs':<21}first token, cold -> served"


def row(result: Result) -> str:
    cold, served = result.cold, result.served
    start = f"{result.case.name:<16}{len(served.prompt_ids):>8}"
    if not result.served_tokens:
        return f"{start}{'-':>8}  not served"
    logprobs = result.equals or f"differ by {result.difference:.2g}"
    text = "equal" if cold.text == served.text else "as own" if result.equals else "differs"
    times = f"{1e3 * cold.first_token_s:.0f} ms -> {1e3 * served.first_token_s:.0f} ms"
    return f"{start}{result.served_tokens:>8}  {text:<8}{logprobs:<21}{times}"
