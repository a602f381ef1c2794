-- Ends a page of the jobs whose messages wait in a list, as cancelled. A job that a worker has is not touched.
-- KEYS: list, waiting jobs of its queue. ARGV: the options, most messages, JSON of the end after its `seq`, what Celery stores
-- before and behind the job's id, seconds to keep that or ''.
-- Returns how many messages were taken, how many jobs have ended, and the messages of jobs that have to be ended one by one:
-- they belong to a group or a chain, have events already, or were sent by plain Celery.
local options = write_options()
local most, data, before_id, behind_id, expires = unpack(ARGV, NUM_OPTIONS + 1, NUM_OPTIONS + 5)
local messages = redis.call('RPOP', KEYS[1], most) or {}
local num_ended, others = 0, {}
for _, message in ipairs(messages) do
  local id = id_of(message)
  local job = JOB .. (id or '')
  local found = redis.call('HMGET', job, 'state', 'next_seq')
  local is_ours = string.find(message, '"' .. OURS .. '"', 1, true)
  local has_family = string.find(message, '"group": "', 1, true) or string.find(message, '"parent_id": "', 1, true)
  if found[1] == 'queued' and found[2] == '0' and is_ours and not has_family then
    local event = append_event(options, job, id, 0, data)
    end_job(options, job, id, 'purge', false, event)
    local value = before_id .. id .. behind_id
    if expires == '' then redis.call('SET', RESULT .. id, value) else redis.call('SETEX', RESULT .. id, expires, value) end
    redis.call('PUBLISH', RESULT .. id, value)
    settle(job, id)
    num_ended = num_ended + 1
  elseif not is_ours or found[1] == 'queued' or found[1] == 'handed_back' then
    others[#others+1] = message
  elseif id then
    redis.call('ZREM', KEYS[2], id) -- evicted by Redis, or a copy of a message that a worker holds
  end
end
return {#messages, num_ended, others}
