-- Journals and publishes events, each only if its run is the job's current one.
-- KEYS: entry, journal, cancel, Celery's result for each event. ARGV: field, max events, four times of life and the time to
-- store a result (in seconds), then eleven values for each event, and key and value of each of its contexts, which are kept
-- like a result. `data` is its JSON after the `seq`, which stands before it.
-- With `stored`, what Celery keeps of a job that ends well, nothing is left to do for it: Celery has its result, and whoever
-- holds the message by `token` is done with it.
-- Returns the places of events whose run is superseded, and of those before which the journal has a gap.
local field, max_events, event_ttl, journal_ttl, result_ttl, dead_ttl, settle =
  ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])
local superseded, gaps, next = {}, {}, 8
for i = 0, #KEYS / 4 - 1 do
  local job, journal, cancel = KEYS[4*i+1], KEYS[4*i+2], KEYS[4*i+3]
  local id, run, kind, seq, channel, data, result, stored, expires, token, contexts = unpack(ARGV, next, next + 10)
  local first = next + 11
  next = first + 2 * contexts
  local ends = kind == 'end' or kind == 'dead'
  local found = redis.call('HMGET', job, 'run', 'state', 'queue', 'ended_by', 'failures', 'next_seq',
                           'holder')
  local state, next_seq = found[2], tonumber(found[6] or 0)
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
    if not (state == 'done' and found[4] == run) then superseded[#superseded+1] = i end
  elseif seq > next_seq then
    gaps[#gaps+1] = i -- Redis has lost events that it had taken: a failover
  elseif seq == next_seq then -- else it is written a second time
    local event = '{"seq":' .. seq .. ',' .. data
    redis.call('XADD', journal, 'MAXLEN', '~', max_events, (seq + 1) .. '-0', field, event)
    redis.call('PUBLISH', channel, event)
    redis.call('HSET', job, 'next_seq', seq + 1)
    if kind == 'started' or ends then redis.call('ZREM', WAITING .. found[3], id) end
    if ends then
      redis.call('HSET', job, 'state', 'done', 'ended_by', run, 'end', event)
      forget(job, id, found[3])
      for at = first, next - 2, 2 do redis.call('SETEX', CONTEXT .. ARGV[at], result_ttl, ARGV[at+1]) end
      if stored ~= '' then
        tell_celery(KEYS[4*i+4], stored, expires)
        redis.call('ZREM', DUE, id)
        if found[7] == token then let_go(job, id) end
      else
        if result ~= '' then redis.call('HSET', job, 'result', result) end
        redis.call('ZADD', DUE, stamp(clock() + settle), id) -- Celery has its result by then, or gets it
      end
      redis.call('DEL', cancel)
      redis.call('EXPIRE', journal, event_ttl)
      if kind == 'dead' then
        redis.call('ZADD', DEAD, stamp(clock()), id) -- with its message, so that it can be queued again
        redis.call('EXPIRE', job, dead_ttl)
      else
        if run ~= '' then redis.call('HDEL', job, 'message') end -- else it says who waits for the job (canvas_steps.py)
        redis.call('EXPIRE', job, redis.call('HEXISTS', job, 'digest') == 1 and result_ttl or event_ttl)
      end
    elseif kind == 'token' then
      if found[5] ~= '0' then redis.call('HSET', job, 'failures', 0) end
      if seq % 64 == 0 then redis.call('EXPIRE', journal, journal_ttl) end
    else
      redis.call('EXPIRE', journal, journal_ttl)
      redis.call('ZADD', RUNNING, stamp(clock()), id)
    end
  end
end
return {superseded, gaps}
