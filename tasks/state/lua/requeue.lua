-- Returns a message to the head of its queue, if this worker still holds it.
-- KEYS: entry, cancel. ARGV: id, token of taking. Returns 1 if it did.
local job, cancel = unpack(KEYS)
local id, token = unpack(ARGV)
if redis.call('HGET', job, 'holder') ~= token then return 0 end
requeue(job, cancel, id)
return 1
