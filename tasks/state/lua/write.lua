-- Journals and publishes events, each only if its run is the job's current one.
-- ARGV: field, max events, four times of life and the time to store a result (in seconds), the beginning of channels' names;
-- then five values for each event, and for one that ends its job five more, and key and value of each of its contexts, which
-- are kept like a result. `data` is its JSON after the `seq`, which stands before it.
-- With `stored`, what Celery keeps of a job that ends well, nothing is left to do for it: Celery has its result, and whoever
-- holds the message by `token` is done with it.
-- Returns the places of events whose run is superseded, and of those before which the journal has a gap.
-- Every token comes through here: what only other events need is passed, and read, with these alone.
local field, max_events, event_ttl, journal_ttl, result_ttl, dead_ttl, settle, channels =
  ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7]), ARGV[8]
local superseded, gaps, next, i = {}, {}, 9, -1
while next <= #ARGV do
  local id, run, kind, seq, data = unpack(ARGV, next, next + 4)
  next, i = next + 5, i + 1
  local ends = kind == 'end' or kind == 'dead'
  local result, stored, expires, token, contexts
  local first = next + 5
  if ends then
    result, stored, expires, token, contexts = unpack(ARGV, next, next + 4)
    next = first + 2 * contexts
  end
  local job, journal = JOB .. id, JOURNAL .. id
  local found = redis.call('HMGET', job, 'run', 'state', 'next_seq', 'failures')
  local state, next_seq = found[2], tonumber(found[3] or 0)
  local mine
  if run == '' then -- no worker runs it: the event is the next one
    mine = state == 'queued' or state == 'handed_back'
    seq = next_seq
  else
    mine = state == 'running' and found[1] == run
    seq = tonumber(seq)
  end
  if not mine then
    -- what is written a second time after a lost reply is not superseded
    if not (state == 'done' and redis.call('HGET', job, 'ended_by') == run) then superseded[#superseded+1] = i end
  elseif seq > next_seq then
    gaps[#gaps+1] = i -- Redis has lost events that it had taken: a failover
  elseif seq == next_seq then -- else it is written a second time
    local event = '{"seq":' .. seq .. ',' .. data
    redis.call('XADD', journal, 'MAXLEN', '~', max_events, (seq + 1) .. '-0', field, event)
    redis.call('PUBLISH', channels .. id, event)
    redis.call('HSET', job, 'next_seq', seq + 1)
    local queue = (kind == 'started' or ends) and redis.call('HGET', job, 'queue')
    if queue then redis.call('ZREM', WAITING .. queue, id) end
    if ends then
      redis.call('HSET', job, 'state', 'done', 'ended_by', run, 'end', event)
      forget(job, id, queue)
      for at = first, next - 2, 2 do redis.call('SETEX', CONTEXT .. ARGV[at], result_ttl, ARGV[at+1]) end
      if stored ~= '' then
        tell_celery(RESULT .. id, stored, expires)
        redis.call('ZREM', DUE, id)
        if redis.call('HGET', job, 'holder') == token then let_go(job, id) end
      else
        if result ~= '' then redis.call('HSET', job, 'result', result) end
        redis.call('ZADD', DUE, stamp(clock() + settle), id) -- Celery has its result by then, or gets it
      end
      tell_heeded(id, event)
      redis.call('DEL', CANCEL .. id)
      redis.call('EXPIRE', journal, event_ttl)
      if kind == 'dead' then
        redis.call('ZADD', DEAD, stamp(clock()), id) -- with its message, so that it can be queued again
        redis.call('EXPIRE', job, dead_ttl)
      else
        if run ~= '' then redis.call('HDEL', job, 'message') end -- else it says who waits for the job (canvas_steps.py)
        redis.call('EXPIRE', job, redis.call('HEXISTS', job, 'digest') == 1 and result_ttl or event_ttl)
      end
    elseif kind == 'token' then
      if found[4] ~= '0' then redis.call('HSET', job, 'failures', 0) end
      if seq % 64 == 0 then redis.call('EXPIRE', journal, journal_ttl) end
    else
      redis.call('EXPIRE', journal, journal_ttl)
      redis.call('ZADD', RUNNING, stamp(clock()), id)
    end
  end
end
return {superseded, gaps}
