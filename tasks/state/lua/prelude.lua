-- What all scripts share. docs/delivery.md has the states; contract/keys.py the keys.
-- What Python puts before this: WAITING, JOB, CANCEL, RESULT, JOURNAL, CONTEXT and HEEDED (prefixes), QUEUES, RUNNING, DUE, LEASES, MISSING, DEAD,
-- ENDS, MOST_ENDS, WEIGHT; OURS and WEIGHS, names of headers; and the functions `clock` and `stamp` (connection/redis_clock.py).

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

-- A worker holds the job's message from now on, unless the answer says otherwise: verdict, seconds since it was submitted
-- or ''.
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
local function let_go(job, id)
  redis.call('HDEL', job, 'holder')
  redis.call('ZREM', LEASES, id)
end

-- The job has not ended, and no worker holds its message: it is the next one of its queue.
local function give_back(job, cancel, id)
  let_go(job, id)
  local found = redis.call('HMGET', job, 'state', 'queue', 'list', 'priority', 'submitted_at', 'message')
  local state, message = found[1], found[6]
  if not message or state == 'done' then return false end
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
local function tell_celery(key, value, expires)
  if string.find(redis.call('GETRANGE', key, 0, 30), '^{"status": ?"SUCCESS"') then return false end
  if expires == '' then redis.call('SET', key, value) else redis.call('SETEX', key, expires, value) end
  redis.call('PUBLISH', key, value)
  return true
end

-- Nothing is left to do for the job but to keep what is known of it for a while.
local function forget(job, id, queue)
  redis.call('ZREM', WAITING .. queue, id)
  redis.call('ZREM', RUNNING, id)
end

-- Whoever asked to hear of the job's end finds in a stream the text that they left, and how it ended: `error`, or the finish_reason.
local function tell_heeded(id, event)
  local told = redis.call('GET', HEEDED .. id)
  if not told then return end
  local how = string.match(event, '^{"seq":%d+,"type":"(error)"')
    or string.match(event, '^{"seq":%d+,"type":"done","finish_reason":"(%a+)"')
  redis.call('XADD', ENDS, 'MAXLEN', '~', MOST_ENDS, '*', 'heeded', told, 'end', how or '')
  redis.call('DEL', HEEDED .. id)
end
