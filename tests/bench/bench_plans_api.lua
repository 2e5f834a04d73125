-- Asks for previews: BODY is a file that holds the experiment with @NUMBER@ where each request is to be another one;
-- COUNT, where it is not 0, is how many answers are enough.
local file = assert(io.open(os.getenv("BODY")))
local body = file:read("*a")
file:close()
local threads = {}
local asked = 0
local answered, most = 0, tonumber(os.getenv("COUNT"))

wrk.method = "POST"
wrk.headers["Authorization"] = "Bearer " .. os.getenv("TOKEN")
wrk.headers["Content-Type"] = "application/json"

function setup(thread)
  table.insert(threads, thread)
end

function init()
  statuses = {}
end

function request()
  asked = asked + 1
  return wrk.format(nil, nil, nil, (body:gsub("@NUMBER@", string.format("%.3f", asked / 1000))))
end

function response(status)
  statuses[status] = (statuses[status] or 0) + 1
  answered = answered + 1
  if answered == most then
    io.popen("kill -INT $PPID"):close() -- wrk ends as by Ctrl-C, and tells what it saw
  end
end

function done(summary, latency)
  local told = {}
  for _, thread in ipairs(threads) do
    for status, count in pairs(thread:get("statuses")) do
      table.insert(told, string.format("%dx%d", count, status))
    end
  end
  io.write(string.format(
    "RESULT rate=%.1f p50=%.1f p90=%.1f p99=%.1f max=%.1f errors=%d answers=%s\n",
    summary.requests / summary.duration * 1e6,
    latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout,
    table.concat(told, ",")))
end
