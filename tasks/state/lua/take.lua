-- A worker has taken a message from its queue, and takes more of what waits there: a page for which it has room.
-- KEYS: entry, then message lists, the next one first. ARGV: id, token of this taking, lease in seconds, what part of a list
-- a page leaves to others, most bytes of a message, then for each model its room and its number of lists.
-- Returns verdict and seconds since it was submitted or '', and then for each message of the page its list, itself, its
-- token (that of this taking and a number), verdict and seconds.
local token, lease, part, most_bytes = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local told = {hold(KEYS[1], ARGV[1], token, lease)}
local first = 2 -- list of the next model
for at = 6, #ARGV, 2 do
  local room, lists = tonumber(ARGV[at]), tonumber(ARGV[at+1])
  for i = first, first + lists - 1 do
    local list = KEYS[i]
    local left = room > 0 and math.ceil(redis.call('LLEN', list) / part) or 0
    while room > 0 and left > 0 do
      local message = redis.call('LINDEX', list, -1)
      local id = #message <= most_bytes and id_of(message)
      -- what plain Celery sent, and what counts as many jobs, comes alone: a worker looks at it first
      if not id or not string.find(message, '"' .. OURS .. '"', 1, true) or string.find(message, '"' .. WEIGHS .. '"', 1, true) then
        room = 0
      else
        redis.call('RPOP', list)
        local own = token .. '.' .. (#told - 2)
        local verdict, waited = hold(JOB .. id, id, own, lease)
        for _, value in ipairs({list, message, own, verdict, waited}) do told[#told+1] = value end
        room, left = room - 1, left - 1
      end
    end
  end
  first = first + lists
end
return told
