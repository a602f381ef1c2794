-- Finds the jobs of a queue and priority that may have lost their message: no worker holds it, and by the order of the queue it
-- should stand before the first message that no worker has had, and does not. The cost does not depend on how many jobs wait.
-- Messages at the head whose job has ended are removed. One without an entry stays: a worker tells its sender.
-- KEYS: list of messages, waiting jobs. ARGV: priority, seconds after which a job has settled in its queue, most messages at
-- the head, most jobs, score of the job to continue with or ''.
-- Returns the score of the last job that was looked at if there may be more, else '', then the ids.
local list, waiting = unpack(KEYS)
local priority, settled_s, most_heads, most_jobs, after = unpack(ARGV)
priority, settled_s, most_heads, most_jobs = tonumber(priority), tonumber(settled_s), tonumber(most_heads), tonumber(most_jobs)
local MAX_REMOVED = 2000 -- messages, some milliseconds

for _ = 1, MAX_REMOVED do
  local message = redis.call('LINDEX', list, -1)
  local id = message and id_of(message)
  if not id or not string.find(message, '"' .. OURS .. '"', 1, true) then break end
  local found = redis.call('HMGET', JOB .. id, 'state', 'settled')
  if not found[1] or not found[2] then break end
  redis.call('RPOP', list)
  redis.call('ZREM', waiting, id)
end

local low, high = priority * WEIGHT, priority * WEIGHT + clock() - settled_s
if #redis.call('ZRANGEBYSCORE', waiting, stamp(low), stamp(high), 'LIMIT', 0, 1) == 0 then return {''} end
local at_head, first, at = {}, nil, 1
while not first do
  local message = redis.call('LINDEX', list, -at)
  if not message then break end
  if at > most_heads then return {''} end -- too many came back to the head to tell
  local id = id_of(message)
  if id then
    at_head[id] = true
    local found = redis.call('HMGET', JOB .. id, 'submitted_at', 'returned')
    if found[1] and not found[2] then first = tonumber(found[1]) end
  end
  at = at + 1
end
if first then high = math.min(high, priority * WEIGHT + first - settled_s) end
local from = after == '' and stamp(low) or after
local old = redis.call('ZRANGEBYSCORE', waiting, from, stamp(high), 'WITHSCORES', 'LIMIT', 0, most_jobs)
local found = {#old == 2 * most_jobs and old[#old] or ''}
for i = 1, #old, 2 do
  if not at_head[old[i]] and not redis.call('ZSCORE', LEASES, old[i]) then found[#found+1] = old[i] end
end
return found
