-- Drops a message that Celery does not need any more. A worker that does not hold it changes nothing.
-- KEYS: entry. ARGV: id, token of taking, seconds after which a job that Celery has refused gets its end, seconds after which
-- the claim on the body of a chord has expired. Returns 1 if the worker held it.
local job = KEYS[1]
local id, token, refused_s, claim_s = unpack(ARGV)
local found = redis.call('HMGET', job, 'holder', 'state', 'stored', 'settled', 'message')
local holder, state, stored, settled, message = unpack(found, 1, 5)
if holder ~= token then return 0 end
drop_holder(job, id)
if state == 'queued' or state == 'handed_back' then
  -- Celery has refused it, or stores a revoke next. It is not queued again; if Celery does not end it, the reaper does.
  redis.call('HSET', job, 'refused', 1)
  redis.call('ZADD', DUE, stamp(clock() + refused_s), id)
elseif state == 'done' and not settled then
  -- Celery reserves the body of a chord for the worker that counted the last part. If the reply to that was lost, or the
  -- worker died, nobody sends the body: then the reaper counts this part again.
  local group = string.match(message or '', '"group": ?"([^"]+)"')
  local claim = group and redis.call('GET', CHORD .. group .. '.c')
  if claim and claim ~= 'done' and redis.call('EXISTS', CHORD .. group .. '.s') == 1 then
    redis.call('ZADD', DUE, stamp(clock() + claim_s), id)
  elseif stored or string.find(message or '', '"ignore_result": ?true') then
    settle(job, id)
  else
    redis.call('ZADD', DUE, stamp(clock()), id) -- Celery could not store the end: the reaper does
  end
end
return 1
