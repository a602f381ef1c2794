#!/usr/bin/env bash
# Start a worker on this machine. All machines use the same Redis URL and the same models.
set -euo pipefail
: "${CELLAMA_REDIS_URL:?must be the URL of the Redis server that all machines share, for instance redis://cellama:PASSWORD@redis.internal:6379/0}"
export CELLAMA_MODELS="${CELLAMA_MODELS:-tiny=bundled://tiny}"
export CELLAMA_DRAIN_S="${CELLAMA_DRAIN_S:-30}" # seconds after SIGTERM until other machines take over the running jobs
exec cellama worker
