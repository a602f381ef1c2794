"""Limits for job parameters that determine how much memory or work a job needs.

Producers check these limits before they queue a job, and the engine checks them again. docs/limits.md lists the limits,
and a test compares this list with the code. The setting `max_payload_bytes` limits the size of a whole job.
"""

from __future__ import annotations

# Numbers that do not determine memory or work: limits of llama.cpp's 32-bit integers.
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**32 - 2  # 0xFFFFFFFF means "random" in llama.h
MAX_TIMEOUT_S = 30 * 24 * 3600  # a month; much longer waits would overflow in Python

# Texts, lists, nesting
MAX_TEXT_CHARS = 1 << 23  # per text; tokenizing this length takes several seconds
MAX_NAME_CHARS = 256  # per id, scope, or name of a rule or adapter
MAX_PROMPT_TOKENS = 1 << 20  # no model has a longer context
MAX_PROBE_CHARS = 100_000  # per text to look up in caches; a worker takes no jobs meanwhile
MAX_EXTRA_FILES = 1024  # per text with a gap
MAX_TEXTS = 10_000  # texts of an embedding job, or documents of a reranking job
# Numbers in all vectors of an embedding job. They take 50 MB as JSON, which keep Redis and readers busy for 0.5 s.
MAX_NUMBERS = 1 << 22
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # per content of a message
MAX_TOOL_CALLS = 128  # per message
MAX_TOOLS = 128
MAX_JSON_CHARS = 100_000  # template_args, or a tool's parameters, as JSON
MAX_TEMPLATE_CHARS = 100_000  # per chat_template; the longest templates of known models have 20,000
MAX_JSON_DEPTH = 64  # nesting of the same values; the recursion limits of Python and Jinja are close to 1000

MAX_FAIRNESS_WEIGHT = 1e6  # so that services stay exact

# Sampling
MAX_TEMPERATURE = 1000.0  # with a higher temperature all tokens are equally likely
MAX_SIGMA = 1000.0  # standard deviations; far fewer keep every token
MAX_DYNATEMP_EXPONENT = 100.0
MAX_PENALTY = 1000.0  # frequency, presence, and the multiplier of DRY; logits are about ±100
MIN_REPEAT_PENALTY = 0.01  # logits are multiplied and divided by it, and must stay finite
MAX_REPEAT_PENALTY = 100.0
MAX_LOOK_BACK = 1 << 20  # tokens that penalties and DRY consider
MAX_DRY_BASE = 100.0
MAX_DRY_BREAKERS = 32  # the whole vocabulary is searched for each
MAX_DRY_BREAKER_BYTES = 40  # llama.cpp truncates longer breakers
MAX_MIROSTAT_TAU = 100.0  # bits; the least likely of a million equal tokens has 20
MAX_MIROSTAT_ETA = 10.0
MAX_BIASES = 16_384
MAX_BIAS = 1e6  # absolute value; -inf forbids a token
MAX_LOGPROBS = 100  # alternatives per token
MAX_COMPLETIONS = 128
MAX_REPORTED = 1 << 19  # alternatives of all tokens in all completions; a worker writes them within half a second
MAX_STOPS = 32
MAX_STOP_TOKENS = 128
MAX_STOP_CHARS = 256  # per stop string; every token is compared with all of them
MAX_ADAPTERS = 32
MAX_ADAPTER_SCALE = 100.0

# Grammars and schemas (docs/adr/006-grammars.md)
MAX_GRAMMAR_CHARS = 100_000
MAX_GRAMMAR_DEPTH = 64  # nested parentheses
MAX_GRAMMAR_NODES = 200_000  # characters, ranges, references and repetitions, after ranges are converted to bytes
MAX_GRAMMAR_REPEATS = 1_000_000  # m and n in {m,n}, which are counted instead of expanded
MAX_GRAMMAR_STACKS = 10_000  # simultaneous parse stacks per text
GRAMMAR_WORK = 200_000  # parse steps per request, about 0.4 s
GRAMMAR_WORK_PER_TOKEN = 5_000  # additional parse steps per token; cached results are free
MAX_REGEX_CHARS = 20_000
MAX_LARK_CHARS = 100_000
MAX_COMPILED_GRAMMARS = 16  # most recently used grammars cached per vocabulary; the largest take 3 MB
# In llguidance's units. Objects with 1,000 properties and enums of 5,000 values need at most half of the size. The most
# expensive of 680 hostile schemas took 0.3 s to compile, and 25 ms for one mask of 150,000 tokens.
GRAMMAR_SIZE = 15_000  # symbols of a compiled grammar
GRAMMAR_COMPILE_FUEL = 500_000  # steps to build a lexer; enums of 5,000 values take less than a fifth
GRAMMAR_STEP_FUEL = 100_000  # steps to compute one mask; common schemas take less than a third
GRAMMAR_STEP_ITEMS = 10_000  # parser items per mask; common schemas have less than a tenth
GRAMMAR_ROW_ITEMS = 1_000  # parser items per position of the text; common schemas have less than a fifth
GRAMMAR_LEXER_STATES = 120_000  # up to 1 kB each; a string with maxLength may need 10 per character
MAX_SCHEMA_CHARS = 100_000
MAX_SCHEMA_DEPTH = 64  # nested schemas
