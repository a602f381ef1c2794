#!/usr/bin/env bash
# Starts a worker on this machine. All machines get the same two lines of set-up: where Redis is, and the models.
set -euo pipefail
: "${CELLAMA_REDIS_URL:?names the Redis that all machines share, for instance redis://cellama:PASSWORD@redis.internal:6379/0}"
export CELLAMA_MODELS="${CELLAMA_MODELS:-tiny=bundled://tiny}"
export CELLAMA_DRAIN_S="${CELLAMA_DRAIN_S:-30}" # SIGTERM: jobs finish for so long, then other machines get them
exec cellama worker
