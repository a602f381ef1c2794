"""The one table of limits on what a job may ask for: every parameter that sizes memory or work has one.

Producers check them before anything is queued, the engine once more. docs/limits.md lists them (a test compares).
The size of a job as a whole is a setting (`max_payload_bytes`).
"""

from __future__ import annotations

# Numbers that size nothing: what llama.cpp's 32-bit integers hold.
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**32 - 2  # llama.h: 0xFFFFFFFF means "random"
MAX_TIMEOUT_S = 30 * 24 * 3600  # waits of Python overflow beyond some centuries; no caller waits longer than a month

# Texts, lists, nesting
MAX_TEXT_CHARS = 1 << 23  # of one text: some seconds of tokenizing
MAX_NAME_CHARS = 256  # of ids, scopes, names of rules and adapters
MAX_PROMPT_TOKENS = 1 << 20  # no model has a longer context
MAX_PROBE_CHARS = 100_000  # of a text that is looked for in caches: a worker takes no jobs meanwhile
MAX_TEXTS = 10_000  # of one embedding job; documents of one reranking job
MAX_NUMBERS = (
    1 << 22
)  # of all vectors of an embedding job: 50 MB of JSON, which keep Redis and readers for half a second
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of the content of a message
MAX_TOOL_CALLS = 128  # of a message
MAX_TOOLS = 128
MAX_JSON_CHARS = 100_000  # of template_args, and of a tool's parameters, as JSON
MAX_JSON_DEPTH = 64  # of the same; Python's and Jinja's recursion ends near 1000

# The choice of tokens
MAX_TEMPERATURE = 1000.0  # beyond, every token is as likely as any other
MAX_PENALTY = 1000.0  # frequency, presence, DRY's multiplier; logits are some ±100
MIN_REPEAT_PENALTY = 0.01  # logits are multiplied and divided by it: both must stay numbers
MAX_REPEAT_PENALTY = 100.0
MAX_LOOK_BACK = 1 << 20  # tokens that penalties and DRY look back on
MAX_DRY_BASE = 100.0
MAX_DRY_BREAKERS = 32  # each is looked for in the whole vocabulary
MAX_DRY_BREAKER_BYTES = 40  # llama.cpp cuts them there
MAX_MIROSTAT_TAU = 100.0  # bits; the rarest of a million tokens has 20
MAX_MIROSTAT_ETA = 10.0
MAX_BIASES = 16_384
MAX_BIAS = 1e6  # either way; -inf forbids a token
MAX_LOGPROBS = 100  # alternatives per token
MAX_COMPLETIONS = 128
MAX_REPORTED = 1 << 19  # alternatives of all tokens of all completions: a worker writes them within half a second
MAX_STOPS = 32
MAX_STOP_CHARS = 256  # of each: every token is compared with all of them
MAX_ADAPTERS = 32
MAX_ADAPTER_SCALE = 100.0

# Grammars and schemas (docs/adr/006-grammars.md)
MAX_GRAMMAR_CHARS = 100_000
MAX_GRAMMAR_DEPTH = 64  # parentheses in parentheses
MAX_GRAMMAR_NODES = 200_000  # characters, ranges, references and repetitions, after ranges became bytes
MAX_GRAMMAR_REPEATS = 1_000_000  # m and n of {m,n}; they are counted, not written out
MAX_GRAMMAR_STACKS = 10_000  # ways to go on that a text has at the same time
GRAMMAR_WORK = 200_000  # ways looked at for a request in all (some 0.4 s) ...
GRAMMAR_WORK_PER_TOKEN = 5_000  # ... and so many more with every token; what was seen before is free
MAX_REGEX_CHARS = 20_000
MAX_LARK_CHARS = 100_000
MAX_COMPILED_GRAMMARS = 16  # kept of a vocabulary, those used last; the largest take 3 MB
# llguidance's own counts. Objects with 1,000 properties and enums of 5,000 values need half of the size or less. The
# heaviest of 680 hostile schemas took 0.3 s to compile and 25 ms for one mask (150,000 tokens).
GRAMMAR_SIZE = 15_000  # symbols of a compiled grammar
GRAMMAR_COMPILE_FUEL = 500_000  # steps to build a lexer; enums of 5,000 values take less than a fifth
GRAMMAR_STEP_FUEL = 100_000  # steps to compute one mask; usual schemas take less than a third
GRAMMAR_STEP_ITEMS = 10_000  # ways looked at for one mask; usual schemas have less than a tenth
GRAMMAR_ROW_ITEMS = 1_000  # ways to go on that a text has at the same time; usual schemas have less than a fifth
GRAMMAR_LEXER_STATES = 120_000  # up to 1 kB each; a text with maxLength may need 10 for each character
MAX_SCHEMA_CHARS = 100_000
MAX_SCHEMA_DEPTH = 64  # schemas in schemas
