-- Gives a worker the message that it has popped from its list, and a page of others that wait, for which it has capacity.
-- KEYS: entry, then the lists of each model, the first choice first.
-- ARGV: id, token of this taking, lease in seconds, the part of a list that is left to other workers, most bytes of a message;
-- then for each model: its capacity, its number of lists.
-- Returns verdict and seconds since the job was submitted or ''; then for each message of the page its list, the message, its
-- token (that of this taking and a number), verdict and seconds.
local id, token, lease_s, part, most_bytes = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local reply = {hold(KEYS[1], id, token, lease_s)}
local first = 2 -- list of the next model
for at = 6, #ARGV, 2 do
  local capacity, num_lists = tonumber(ARGV[at]), tonumber(ARGV[at+1])
  for i = first, first + num_lists - 1 do
    local list = KEYS[i]
    local num_left = capacity > 0 and math.ceil(redis.call('LLEN', list) / part) or 0
    while capacity > 0 and num_left > 0 do
      local message = redis.call('LINDEX', list, -1)
      local of = #message <= most_bytes and id_of(message)
      -- what plain Celery sent, and what weighs more than one job, comes alone: a worker looks at it first
      if not of or not string.find(message, '"' .. OURS .. '"', 1, true) or string.find(message, '"' .. WEIGHS .. '"', 1, true) then
        capacity = 0
      else
        redis.call('RPOP', list)
        local own = token .. '.' .. (#reply - 2)
        local verdict, waited = hold(JOB .. of, of, own, lease_s)
        for _, value in ipairs({list, message, own, verdict, waited}) do reply[#reply+1] = value end
        capacity, num_left = capacity - 1, num_left - 1
      end
    end
  end
  first = first + num_lists
end
return reply
