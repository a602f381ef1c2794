-- Functions that all scripts of the ledger share. docs/delivery.md explains the states; contract/keys.py lists the keys.
-- Python puts these constants before this file: WAITING, JOB, CANCEL, RESULT, JOURNAL, CONTEXT, HEEDED and CHORD (prefixes of keys),
-- QUEUES, RUNNING, DELAYED, DUE, LEASES, MISSING, DEAD, ENDS, MOST_ENDS, WEIGHT, OURS and WEIGHS (names of message headers),
-- and the functions `clock` and `stamp` (connection/redis_clock.py).

-- Returns the job id of a message, from its properties. The headers come before these, and may have the same names in them,
-- as a user chooses. Most messages are written by Python, with these blanks; the plain search is much faster.
local function id_of(message)
  local at = 0
  local following = string.find(message, '"properties": {', 1, true)
  while following do
    at, following = following, string.find(message, '"properties": {', following + 1, true)
  end
  if at == 0 then return string.match(message, '.*"properties": *{.-"correlation_id": *"([^"]+)"') end
  return string.match(message, '"correlation_id": ?"([^"]+)"', at)
end

-- The job has no slot: its rank in its queue is its rank here.
local function wait_in_queue(id, queue, priority, submitted_at)
  redis.call('ZADD', WAITING .. queue, stamp(priority * WEIGHT + submitted_at), id)
  redis.call('SADD', QUEUES, queue)
end

-- A new entry. `list` is the Redis list that the message stands in, or goes back to.
local function note(job, id, task, queue, list, priority, timeout, message, submitted_at)
  redis.call('HSET', job, 'state', 'queued', 'task', task, 'queue', queue, 'list', list, 'priority', priority,
             'submitted_at', stamp(submitted_at), 'message', message, 'next_seq', 0)
  redis.call('DEL', JOURNAL .. id) -- of an older job of that id
  wait_in_queue(id, queue, priority, submitted_at)
  if timeout ~= '' then redis.call('ZADD', DUE, stamp(submitted_at + timeout), id) end
end

-- The worker holds the job's message from now on if the verdict is 'held'. Returns the verdict, and the seconds since the job
-- was submitted or ''.
local function hold(job, id, token, lease)
  local found = redis.call('HMGET', job, 'state', 'holder', 'submitted_at')
  local state, holder = found[1], found[2]
  if not state then return 'gone', '' end -- an entry stays as long as its job has not ended
  local waited = stamp(math.max(0, clock() - tonumber(found[3])))
  if state == 'done' then return 'done', waited end
  if holder and holder ~= token then
    local ends_at = redis.call('ZSCORE', LEASES, id)
    if ends_at and tonumber(ends_at) > clock() then return 'copy', waited end
  end
  redis.call('HSET', job, 'holder', token)
  redis.call('ZADD', LEASES, stamp(clock() + lease), id)
  redis.call('ZREM', MISSING, id)
  return 'held', waited
end

-- No worker holds the job's message any more.
local function drop_holder(job, id)
  redis.call('HDEL', job, 'holder')
  redis.call('ZREM', LEASES, id)
end

-- Puts the message of a job that has not ended at the head of its queue. Nobody holds it afterwards.
-- If the job has ended, the reaper takes over what its worker has not done for Celery.
local function requeue(job, cancel, id)
  drop_holder(job, id)
  redis.call('ZREM', DELAYED, id)
  local found = redis.call('HMGET', job, 'state', 'queue', 'list', 'priority', 'submitted_at', 'message', 'refused', 'settled')
  local state, message = found[1], found[6]
  if state == 'done' and not found[8] then redis.call('ZADD', DUE, stamp(clock()), id) end
  if not message or state == 'done' or found[7] then return false end
  redis.call('RPUSH', found[3], message)
  redis.call('HSET', job, 'returned', 1)
  if state == 'running' then
    redis.call('HSET', job, 'state', 'handed_back', 'left_at', stamp(clock()), 'lost', 1)
    redis.call('ZREM', RUNNING, id)
  end
  wait_in_queue(id, found[2], tonumber(found[4]), tonumber(found[5]))
  if redis.call('EXISTS', cancel) == 1 then redis.call('ZADD', DUE, stamp(clock()), id) end
  return true
end

-- Stores a state of Celery's under Celery's own key, and tells its channel. As in Celery, nothing replaces a success.
local function store_state(key, value, expires)
  if string.find(redis.call('GETRANGE', key, 0, 30), '^{"status": ?"SUCCESS"') then return false end
  if expires == '' then redis.call('SET', key, value) else redis.call('SETEX', key, expires, value) end
  redis.call('PUBLISH', key, value)
  return true
end

-- Celery has the end of the job, and what follows the job has been sent. The entry stays for a while, without the message.
local function settle(job, id)
  redis.call('ZREM', DUE, id)
  redis.call('HSET', job, 'settled', 1)
  if redis.call('ZSCORE', DEAD, id) then
    redis.call('HDEL', job, 'result') -- it can be queued again
  else
    redis.call('HDEL', job, 'result', 'message')
  end
  local keep_s = redis.call('HGET', job, 'keep_s')
  if keep_s then redis.call('EXPIRE', job, keep_s) end
end

-- Adds to a stream of webhook events how the job ended, `error` or its finish_reason, if a gateway asked for that.
local function announce_end(id, event)
  local told = redis.call('GET', HEEDED .. id)
  if not told then return end
  local how = string.match(event, '^{"seq":%d+,"type":"(error)"')
    or string.match(event, '^{"seq":%d+,"type":"done","finish_reason":"(%a+)"')
  redis.call('XADD', ENDS, 'MAXLEN', '~', MOST_ENDS, '*', 'heeded', told, 'end', how or '')
  redis.call('DEL', HEEDED .. id)
end

-- The first arguments of scripts that write events; `Ledger.write_options` gives them.
local NUM_OPTIONS = 7
local function write_options()
  return {field = ARGV[1], max_events = ARGV[2], event_ttl_s = ARGV[3], result_ttl_s = ARGV[4], dead_ttl_s = ARGV[5],
          settle_s = tonumber(ARGV[6]), channels = ARGV[7]}
end

-- Appends an event to the journal of its job, and publishes it. `data` is its JSON after the `seq`. Returns its whole JSON.
local function append_event(options, job, id, seq, data)
  local event = '{"seq":' .. seq .. ',' .. data
  redis.call('XADD', JOURNAL .. id, 'MAXLEN', '~', options.max_events, (seq + 1) .. '-0', options.field, event)
  redis.call('PUBLISH', options.channels .. id, event)
  redis.call('HSET', job, 'next_seq', seq + 1)
  return event
end

local SHORT_JOURNAL = 50 -- events; copying more would take longer than the memory is worth
local SHORT_LIST = 2000 -- messages, searched in less than a millisecond
local LARGE_MESSAGE = 65536 -- bytes; there is not room for many such messages

-- The job has ended with this event, which an attempt (`run`) wrote, or none (''). Celery's part follows: `settle`.
local function end_job(options, job, id, run, is_dead, event)
  local found = redis.call('HMGET', job, 'queue', 'digest', 'list', 'message', 'holder')
  local queue, digest, list, message, holder = unpack(found, 1, 5)
  redis.call('ZREM', WAITING .. queue, id)
  redis.call('ZREM', RUNNING, id)
  local was_delayed = redis.call('ZREM', DELAYED, id) == 1
  if run == '' and message and message ~= '' and not holder and not was_delayed then
    -- The message would take memory until a worker or the reaper comes to it. In a long list the search takes too long.
    if #message >= LARGE_MESSAGE or redis.call('LLEN', list) <= SHORT_LIST then redis.call('LREM', list, -1, message) end
  end
  local keep_s = options.event_ttl_s
  if is_dead then
    keep_s = options.dead_ttl_s
    redis.call('ZREMRANGEBYSCORE', DEAD, '-inf', stamp(clock() - keep_s))
    redis.call('ZADD', DEAD, stamp(clock()), id)
  elseif digest then
    keep_s = options.result_ttl_s
  end
  redis.call('HSET', job, 'state', 'done', 'ended_by', run, 'end', event, 'keep_s', keep_s)
  redis.call('DEL', CANCEL .. id)
  local journal = JOURNAL .. id
  if redis.call('XLEN', journal) <= SHORT_JOURNAL then -- Redis reserves 4 KiB for the end of a stream; a copy has its real size
    redis.call('COPY', journal, journal .. ':copy', 'REPLACE')
    redis.call('RENAME', journal .. ':copy', journal)
  end
  redis.call('EXPIRE', journal, options.event_ttl_s)
  announce_end(id, event)
end
