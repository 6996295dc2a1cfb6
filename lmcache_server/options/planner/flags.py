"""What the planner adds to the flags of `lmcache server`."""

FLAGS = {
    "record": {
        "metavar": "FILE",
        "help_text": "File to which the server appends all lookups, for `lmcache plan --from`: times, "
        "numbers of tokens and shortened digests of prompts, but no text. At 256 MiB it is renamed to "
        "FILE.1, and a new file begins.",
    }
}
