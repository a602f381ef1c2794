-- Journals and publishes events, each only if its run is the job's current one.
-- ARGV: the options, then five values for each event, and for a terminal one six more, and key and value of each of its
-- contexts, which are kept like a result. `class` says what the event changes (EVENT_CLASSES in contract/events.py). `data` is
-- its JSON after the `seq`, which stands before it.
-- With `stored`, what Celery keeps of a job that ends well, nothing is left to do for the job: Celery has its result, and the
-- worker that holds the message by `token` needs it no more.
-- Returns the indices of events whose run is superseded, and of those that do not follow what the ledger has of their run.
-- Every token comes through here, so values that only other events need are passed and read with these alone.
local options = write_options()
local superseded, gaps, at, i = {}, {}, NUM_OPTIONS + 1, -1
while at <= #ARGV do
  local id, run, class, seq, data = unpack(ARGV, at, at + 4)
  at, i = at + 5, i + 1
  local is_dead, result, stored, expires, token, first_context
  if class == 'terminal' then
    local num_contexts
    is_dead, result, stored, expires, token, num_contexts = unpack(ARGV, at, at + 5)
    first_context = at + 6
    at = first_context + 2 * num_contexts
  end
  local job = JOB .. id
  local found = redis.call('HMGET', job, 'run', 'state', 'next_seq', 'failures', 'first_seq')
  local state, next_seq = found[2], tonumber(found[3] or 0)
  local is_current, first_seq
  if run == '' then -- no worker runs the job: the event is the next one
    is_current = state == 'queued' or state == 'handed_back'
    seq, first_seq = next_seq, next_seq
  else
    is_current = state == 'running' and found[1] == run
    seq, first_seq = tonumber(seq), tonumber(found[5] or 0)
  end
  if not is_current then
    -- an end that is written a second time, after a lost reply, is not superseded
    if not (state == 'done' and redis.call('HGET', job, 'ended_by') == run) then superseded[#superseded+1] = i end
  elseif seq > next_seq or seq < first_seq then
    gaps[#gaps+1] = i -- Redis has lost events of this run that it had taken (a failover)
  elseif seq == next_seq then -- else it is written a second time
    local event = append_event(options, job, id, seq, data)
    if class == 'terminal' then
      end_job(options, job, id, run, is_dead == '1', event)
      for context = first_context, at - 2, 2 do
        redis.call('SETEX', CONTEXT .. ARGV[context], options.result_ttl_s, ARGV[context+1])
      end
      local holder = redis.call('HGET', job, 'holder')
      if stored ~= '' then
        store_state(RESULT .. id, stored, expires)
        if holder == token then drop_holder(job, id) end
        settle(job, id)
      elseif not holder and redis.call('HEXISTS', job, 'stored') == 1 then
        settle(job, id) -- a revoke or a time limit: Celery has stored the end before the job's thread came to it
      else
        if result ~= '' then redis.call('HSET', job, 'result', result) end
        redis.call('ZADD', DUE, stamp(clock() + options.settle_s), id) -- the worker settles it before, or the reaper does then
      end
    elseif class == 'start' or (class == 'progress' and found[4] ~= '0') then -- the first event of its attempt
      if class == 'progress' then redis.call('HSET', job, 'failures', 0) end
      redis.call('ZREM', WAITING .. redis.call('HGET', job, 'queue'), id)
      redis.call('ZADD', RUNNING, stamp(clock()), id)
    end
  end
end
return {superseded, gaps}
