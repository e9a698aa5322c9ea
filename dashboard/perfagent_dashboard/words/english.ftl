# Every sentence that the pages say, in English. The syntax is Project Fluent's: https://projectfluent.org/fluent/guide/
# Keys and figures are the same in chinese.ftl. A sentence of the scripts (assets/) chooses its plural by $count.

## On every page

pages = Pages
nav_overview = Overview
nav_runs = { runs }
nav_alerts = { alerts }
nav_compare = Compare
nav_settings = Settings
alerts = Alerts
na = n/a
loading = Loading …
theme_light = light
theme_dark = dark
theme_system = as the system
theme_title = Colors: { $theme }. Another choice
language_name = English
language_other = 中文
language_title = 用中文显示
keys_title = Keys
keys_page = the page { $page }
keys_search = search
keys_next = next row or card
keys_previous = the one before
keys_open = open it
keys_ack = acknowledge its alert
keys_zoom = zoom the charts, move them, show everything
keys_help = these keys
keys_close = close
skip = Skip to content
live = live
connecting = connecting
paused = paused
offline = The server does not answer since { $time }. What you see is from then, and nothing that you press is saved.
not_done = The server did not answer: what you pressed is not done.
stale = stale since { $time }
stale_title = The server does not answer. What you see is from { $time }; the page goes on when it is back.
live_title = New samples arrive as they are stored.
copy = Copy
copied = Copied
ago = { $duration } ago
just_now = just now
no_page_title = There is no such page
no_page = Nothing is at this address. The page Runs lists every run.
to_fleet = { to_runs }
failed_title = The server did not answer this request
page_failed = This page could not be made. The server's log says why; the other pages work.
callback_failed = This did not work: the page stays as it was. The server's log says why.
locked_title = This server wants to know who you are
locked = Open the one-time address that `perfagent up` printed in its terminal; it signs this browser in.

## States

state_starting = starting
state_running = running
state_lost = lost
state_finished = finished
state_failed = failed
state_oom = out of memory
state_killed = killed
state_preempted = preempted

## Fleet

runs = Runs
search = Search runs
project = Project
all_projects = All projects
all = All
column_run = { run }
column_state = State
column_verdict = { verdict }
column_step = Step
column_throughput = Throughput
window_newest = { $count ->
    [one] newest { $count } step
   *[other] newest { $count } steps
}
window_whole = whole run
column_loss = Loss
column_trend = Loss trend
column_gpu = { gpu }
column_seen = Last seen
ranks = { $count ->
    [one] { $count } rank
   *[other] { $count } ranks
}
more = Show more
no_match = No run matches this filter.
empty_title = No run has reported yet
empty = Start a training job in one of these two ways and it appears here by itself, within a second.
way_run = Without touching the script
way_run_text = perfagent finds model, optimizer and loader by itself.
way_attach = With one line in the script
way_attach_text = Put it where the model and the optimizer are made.
way_demo = Only looking? This trains a small model on this machine:
way_import = Do you have runs of TensorBoard, W&B, MLflow or trackio? Bring them along (docs/guides/bring-your-history.md says what comes with them):

## Run: head and verdict

run = Run
started = started { $time }
ended = ended { $time }
host = the machine it runs on
attempts = { $count ->
    [one] { $count } attempt
   *[other] { $count } attempts
}
names_left_out = { $count ->
    [one] { $count } metric name of this run was left out: the limit is { $limit }
   *[other] { $count } metric names of this run were left out: the limit is { $limit }
}
names_left_out_or_more = { $count ->
    [one] { $count } metric name of this run, or more, was left out: the limit is { $limit }
   *[other] { $count } metric names of this run, or more, were left out: the limit is { $limit }
}
tags_left_out_or_more = { $count ->
    [one] { $count } tag of this run, or more, was left out: the limit is { $limit }
   *[other] { $count } tags of this run, or more, were left out: the limit is { $limit }
}
step = step
no_run_title = There is no run { $run }
no_run = It may have been deleted, or the address has a typing mistake.
verdict = Verdict
no_agent = Only what the script sends is known of this run. With `perfagent run` or `perfagent.attach(model, optimizer)`, step times, memory and hardware are found by themselves.
since_step = Since step { $step }
since = Since { $time }
on_ranks = { $count ->
    [one] on rank { $ranks }
   *[other] on ranks { $ranks }
}
gain = Expected gain: a step takes up to { $gain } % less time.
fix = What to do
evidence = Evidence
also = Also
earlier = Earlier
resolved = resolved { $time }
acknowledged = Acknowledged { $time }
mute = Mute 1 h
severity_info = info
severity_warning = warning
severity_critical = critical
severity_healthy = healthy
severity_unknown = unknown

## Run: figures

kpi_throughput = Median throughput
kpi_step_time = Median step time
kpi_gpu = GPU utilization
kpi_cpu = Host CPU
kpi_gpu_memory = GPU memory
kpi_memory = Memory
kpi_of = of { $total }
kpi_of_step = of the step
kpi_lowest = min { $value } at { $step }
kpi_lowest_near = min { $value } near step { $step }
kpi_steps_per_s = { $value } steps/s
kpi_steps_per_min = { $value } steps/min
kpi_steps_per_h = { $value } steps/h
kpi_power = { $value } W
kpi_process_cpu = process { $value } %
kpi_processes_cpu = { $count ->
    [one] { $count } process, { $value } %
   *[other] { $count } processes, together { $value } %
}
kpi_processes = { $count ->
    [one] { $count } process
   *[other] { $count } processes
}

## Run: tool bar

tools = Chart controls
smoothing_auto = auto
smoothing_title = At the left end, lines that vary much are smoothed by themselves.
smoothing = Smoothing
x_axis = Horizontal axis
x_step = Step
x_relative = Relative
x_clock = Clock
log_x = Log x
log_y = Log y
clip = Clip spikes
clip_title = Scale each chart to its usual values; what lies outside is marked with its extreme.
clipped_above = ▲ { $value }
clipped_below = ▼ { $value }
range = Range
range_all = { all }
range_last = Last { $steps }
reset_zoom = Reset zoom
filter = Search charts: words or regex
legend_nonfinite = NaN or Inf
zoomed = Steps { $from } to { $to }
no_charts = No metric has arrived yet. Charts appear here as soon as the first step is done.
no_samples = No sample in this range
no_positive = No positive value for a logarithmic axis
chart_failed = Not loaded: { $message }
too_many = More metrics ({ $count }): type a part of a name into the filter.
nonfinite = { $count } NaN or Inf
nonfinite_shown = { $count } NaN or Inf in view
where = Where a step goes
column_part = { part }
column_share = Share
column_median = Median
column_mean = Mean
column_newest = Newest
whole_step = Whole step
spread_ranks = Whole step: the slowest rank in each step. Phases: the mean of the { $count } ranks.
spread_buckets = Median, p90 and p99 are those of the means of { $count } steps.
where_over = Where a step goes, { $over }
where_unit = mean of the steps shown
where_empty = No step times yet
rank_map = Own work of each rank
rank_map_unit = own work ÷ median of the ranks, step by step
unit_s = s
unit_min = min
unit_h = h
unit_d = d

## Run: below the charts

alerts_none = No alert has fired.
details = Details
config = Configuration
console = Console
console_none = The run has not written a line yet.
ending = How it ended
traceback = Traceback

## Alerts

resolved_word = resolved
acknowledged_by = { $who } has it,
somebody = somebody
by_whom = by { $who }
muted_until = muted until
muted_until_ever = muted until somebody undoes it
snoozed_until = snoozed until
snoozed_until_ever = snoozed until it is resolved
silenced_until = silenced until
silenced_until_ever = silenced
alert_history = What happened
alert_fired = fired
alert_reopened = fires again
alert_worse = became more severe
alert_better = became less severe
alert_resolved = { resolved_word }
alert_acknowledged = acknowledged
alert_unacknowledged = acknowledgement taken back
alert_muted = muted
alert_unmuted = mute ended
alert_snoozed = snoozed
alert_unsnoozed = snooze ended
costs = Cost: { $cost }.
note = Note
note_hint = What others should know
quiet_menu = Quiet
act_ack = Acknowledge
act_unack = Take back
act_snooze-1h = Snooze 1 hour
act_snooze-8h = Snooze 8 hours
act_snooze-resolved = Snooze until it is resolved
act_unsnooze = End the snooze
act_mute = Mute this rule in this run
act_unmute = End the mute
act_resolve = Resolve
act_take = Acknowledge { $count }
act_note = { save }
group_told = { $count ->
    [one] { $count } alert
   *[other] { $count } alerts
} in { $runs ->
    [one] { $runs } run
   *[other] { $runs } runs
}
alike_runs = { $count ->
    [one] { $count } run
   *[other] { $count } runs
}
more_alerts = { $count ->
    [one] +{ $count } alert
   *[other] +{ $count } alerts
}
spent_gpu_hours = GPU hours
spent_cpu_core_hours = CPU core hours
spent_gpu_energy_kwh = kWh
spent_gpu_energy_per_token_j = J a token
spent_an_hour = an hour
undo = Undo
done_take = { $count ->
    [one] { $count } alert is acknowledged.
   *[other] { $count } alerts are acknowledged.
}
done_note = The note is saved.
done_ack = Acknowledged.
done_unack = No longer acknowledged.
done_snooze = Snoozed.
done_unsnooze = The snooze is over.
done_mute = Muted.
done_unmute = The mute is over.
done_resolve = Resolved.
done_silence = The silence is on.
done_unsilence = The silence is over.
view_open = Open
view_acknowledged = Acknowledged
view_quiet = { quiet_menu }
view_resolved = Resolved
alerts_none_open = Nothing needs you now.
alerts_none_acknowledged = No alert is acknowledged.
alerts_none_quiet = Nothing is muted, snoozed or silenced.
alerts_none_resolved = No alert has been resolved yet.
alerts_search = Search alerts
may_not_act = You may read. To acknowledge, you need the role operator, which an administrator gives.
silences = Silences and maintenance windows ({ $count } on)
silences_none = No silence. A silence keeps all alerts of the runs that it matches from being sent.
silence_of = Of
silence_value = Called
silence_hours = For hours
silence_repeats = Again
silence_add = Silence
silence_end = End
silence_on = on
silence_off = off
matcher_run = run
matcher_project = project
matcher_tag = tag
matcher_rule = rule
repeats_never = never
repeats_daily = every day
repeats_weekly = every week

## Settings

settings_channels = Channels
settings_rules = Rules
settings_keys = Keys
settings_prices = Prices
settings_storage = Storage
admin_only = Only an administrator sees this: log in as one, or with the address that `perfagent keys login` prints.
on = on
off = off
remove = Remove
save = Save
days = { $count ->
    [one] { $count } day
   *[other] { $count } days
}
for_ever = for ever
version = Version
channel_kind = Kind
channel_name = { name }
channel_url = Address
channel_severity = From severity
channel_language = Language
channel_state = { column_state }
channel_add = { user_add }
channel_added = The channel is there. Send a test to see whether it arrives.
channel_secret = The secret it signs with, shown only now
channel_test = Test
channel_rotate = New secret
channel_rotated = A new secret. The old one signs beside it for a day.
channel_remove = { remove }
channel_removed = The channel is gone.
channels_none = No channel: nobody is notified of an alert.
test_arrived = The test arrived.
test_failed = The test did not arrive: { $why }
kind_webhook = Webhook
kind_slack = Slack
kind_discord = Discord
kind_teams = Microsoft Teams
kind_feishu = Feishu
kind_dingtalk = DingTalk
kind_wecom = WeCom
kind_email = Email
kind_heartbeat = Heartbeat (this server is alive)
key_scope = Scope
key_name = { name }
key_project = { project }
key_created = Created
key_used = Last used
key_limits = Limits
key_expires = Expires
key_limits_how = How much this key may send. Empty: as the server is set. inf: no limit.
requests_per_s = Requests a second
samples_per_s = Samples a second
bytes_per_s = Bytes a second
runs_per_hour = New runs an hour
limit_of_server = as the server
never = never
key_revoke = Revoke
key_revoked = revoked
key_add = Create
key_added = The key is there.
key_gone = The key is revoked, and its sessions are over.
key_secret = The key, shown only now
keys_none = No key. On this machine alone none is needed.
scope_read = read: see every run
scope_operate = operate: see, and act on alerts
scope_ingest = ingest: send from a training job
scope_admin = admin: everything
rules_project = Project
rules_of_server = Rules of the server
rule_on = Judges runs
rule_off = { off }
rule_changed = changed
rule_default = usually { $value } { $unit }
rule_reset = As usual
rule_saved = Saved. It counts from the next sample on.
rule_reset_done = The rule is as usual again.
own_alerts = Your own alerts
own_none = No alert of your own. Make one below: no code is needed.
own_name = { name }
own_when = Fires when
own_severity = Severity
own_project = { project }
own_tags = { tags }
own_tags_how = all runs
own_note = { note }
own_note_how = ends the message
own_metric = Alert when
own_function = What of it
own_function_value = every value
own_function_mean = the mean
own_function_min = the minimum
own_function_max = the maximum
own_function_rise = has not risen
own_function_fall = has not fallen
own_function_missing = is missing
own_comparison = Is
own_threshold = Number
own_duration = For
own_unit = Unit
own_unit_steps = { steps }
own_unit_seconds = seconds
own_unit_minutes = minutes
own_unit_hours = hours
own_run = Run to try it on
own_try = Try on a run
own_add = Add alert
own_edit = Edit
own_remove = { remove }
own_cancel = Cancel
own_saved = Saved. Runs that go on are judged by it from now on.
own_removed = The alert is removed; what it had found is resolved.
own_no_series = No series of this run matches.
own_left_out = { $count ->
    [one] { $count } older sample was not judged.
   *[other] { $count } older samples were not judged.
}
own_would_have = { $count ->
    [one] Would have fired { $count } time
   *[other] Would have fired { $count } times
} in { $samples ->
    [one] { $samples } sample.
   *[other] { $samples } samples.
}
own_show_run = Open the run
own_fired_at = Fired at step
own_until = Until step
own_what = What
all_others = all others
price_gpu_hour = GPU hour
price_cpu_core_hour = CPU core hour
price_kwh = kWh
price_currency = Currency
price_set = Set
price_is_set = The price is set.
price_removed = The price is gone.
prices_none = No price. With one, runs and findings say what they cost.
storage_database = Database
storage_free = Free on its disk
kept_rollup16 = Summaries of 16 steps are kept
kept_rollup256 = Summaries of 256 steps are kept
storage_budget = Size budget
no_limit = no limit
storage_how = How long things are kept is set by `PERFAGENT_SAMPLES_DAYS=90` and the like when the server starts, or by `perfagent retention set`, also for one project.
kept_samples = Samples are kept
kept_runs = Runs are kept
kept_events = Console lines and events are kept
kept_profiles = Profiles are kept
kept_media = Images and other media are kept
kept_alerts = Alerts are kept
kept_audit = The audit log is kept

## Runs

runs_summary = { $all ->
    [one] { $all } run
   *[other] { $all } runs
}, { $attention ->
    [one] { $attention } needs attention
   *[other] { $attention } need attention
}
runs_search = Words, val/acc > 0.6
columns = More columns
columns_hint = Columns: val/loss, config:lr
needs_attention = Needs attention
pick = Pick
picked = { $count } picked
tag = Tag
bulk_tag = Add tag
bulk_ack = { act_ack }
bulk_delete = Delete
delete_sure = { $count ->
    [one] Delete { $count } run with all its samples? This cannot be undone.
   *[other] Delete { $count } runs with all their samples? This cannot be undone.
}
delete_run_sure = Delete this run with all its samples? This cannot be undone.
tagged = { $count ->
    [one] { $count } run has the tag { $tag }.
   *[other] { $count } runs have the tag { $tag }.
}
undone = Undone.
deleted = { $count ->
    [one] { $count } run is deleted.
   *[other] { $count } runs are deleted.
}
run_deleted = The run is deleted.

## Overview

all_well = { $all ->
    [one] Nothing needs you. { $all } run is well, or has ended.
   *[other] Nothing needs you. { $all } runs are well, or have ended.
}
ended_ill = { $count ->
    [one] { $count } run has a critical or warning verdict
   *[other] { $count } runs have a critical or warning verdict
}
attention_head = { $count } of { $all ->
    [one] { $all } run
   *[other] { $all } runs
} { $count ->
    [one] needs attention
   *[other] need attention
}
attention_split = { $critical } critical, { $others ->
    [one] { $others } warning
   *[other] { $others } warnings
}
open_alerts = Open alerts: { $count } ({ $severe } critical or warning, { $info } info)
to_table = Show in the table
running_now = Running now: { $count }
running_above = Running now: { $count }, { $above } of them above
none_running = Nothing is running now.
ended_lately = Ended in the last 24 hours
and_more = and { $count } more

## The page of a run

to_runs = All runs
section_pinned = Pinned
section_logged = Logged by the script
section_training = Training
section_speed = Speed
section_device = Device
section_host = { host_word }
unchanging = Unchanging: { $count }
no_chart_fits = No chart fits this search.
chart_menu = Menu of { $name }
chart_menu_title = Enlarge, pin, download and more
enlarge = Enlarge
shrink = Back to its size
pin = Pin to the top
unpin = Unpin
move_left = Move to the left
move_right = Move to the right
as_axis = Use as horizontal axis
save_png = Save as PNG
save_csv = Save as CSV
y_from = y from
y_to = y to
add_metric = Add a metric
add_rank = Add a rank
remove_lines = Remove added lines
columns_of_charts = Charts in a row
columns_auto = Columns: auto
columns_n = Columns: { $count }
rank_told = rank { $rank }: { $share } of the median
started_word = started
took_word = took
running_word = running for
starting_word = starting for
last_heard_word = last heard
share = Copy link
export = Export
report = Report (one HTML file)
export_csv = All samples as CSV
export_jsonl = All samples as JSON lines
export_parquet = All samples as Parquet
run_menu = More about this run
compare_with = Compare with other runs
edit_run = Name and tags
stop_run = Stop this run
stop_run_sure = End this training after one of its next steps? Its script must have allowed that: attach(stoppable=True), run.should_stop or perfagent.loop. A checkpoint is written where it has any.
delete_run = Delete this run
may_not_change = Changing a run needs the role operator, deleting it the role admin.
name = Name
tags = Tags
notes = Notes
saved = Saved.
to_chart = Show its chart
figures_over = Over the { $over }
kpi_p90 = 90 % are below { $value }
judging = The run is being judged …
why = Why
also_helps = What else may help
first = First:
why_and_more = Why, and other fixes
also_count = { $count ->
    [one] { $count } more finding
   *[other] { $count } more findings
}
all_evidence = { $count ->
    [one] The { $count } figure
   *[other] All { $count } figures
}
fixed_when = Resolved when:
take_stacks = Take stacks
take_profile = Profile 5 steps
asked_stacks = Asked for the stacks of all ranks. They come with their next message: see Ranks.
asked_stop = Asked the training to stop. It ends after a step that all its ranks agree on; if its script does not allow that, it goes on.
asked_profile = Asked for a profile of 5 steps. It comes when they are done: see Time.
whole_traceback = { $count ->
    [one] The { $count } line of the traceback
   *[other] All { $count } lines of the traceback
}
tab_charts = Charts
tab_time = Time
tab_memory = { kpi_memory }
tab_hardware = Hardware
tab_layers = Layers
tab_ranks = Ranks
tab_console = { console }
tab_config = Config
tab_alerts = { alerts }
tab_media = Media
media_image = { $count ->
    [one] { $count } image, { $size }
   *[other] { $count } images, { $size }
}
media_audio = { $count ->
    [one] { $count } sound, { $size }
   *[other] { $count } sounds, { $size }
}
media_table = { $count ->
    [one] { $count } table, { $size }
   *[other] { $count } tables, { $size }
}
media_histogram = { $count ->
    [one] { $count } histogram, { $size }
   *[other] { $count } histograms, { $size }
}
media_none = The script has logged no images, sounds, tables or histograms yet.
media_slider = Step of { $name }
media_enlarge = Enlarge
media_no_rows = The table has no rows.
media_more_rows = { $count ->
    [one] … and { $count } more row.
   *[other] … and { $count } more rows.
}
media_rows_kept = All { $count } that were kept, as JSON
media_nonfinite = { $count ->
    [one] { $count } value was NaN or infinite, and is not in it.
   *[other] { $count } values were NaN or infinite, and are not in it.
}
media_left_out = { $count ->
    [one] { $count } item was left out: too large, too many, or unreadable. The console says why.
   *[other] { $count } items were left out: too large, too many, or unreadable. The console says why.
}
media_more_names = { $count ->
    [one] … and { $count } more name. Log several images as a list under one name.
   *[other] … and { $count } more names. Log several images as a list under one name.
}
tab_marked = A finding is about this
part = Part
line = Line
function = In
looks = Seen
times_a_step = Times a step
sync_lines = Lines that make the host wait for the device
sync_lines_hint = In one sampled step. Read values on the device less often, or all at once.
lines_outside = Where the time goes that no phase covers
lines_outside_hint = Script lines that ran outside the measured phases.
profiles = Profiles
profiles_none = No profile yet.
steps = steps
rank = rank
taken_for = taken for { $why }
operators_none = The profile has no operators.
operator = Operator
calls = Calls
self_cpu = Own time, CPU
self_device = Own time, device
trace = Download the trace
trace_hint = and open it at ui.perfetto.dev.
size = Size
memory_of = What takes the memory
share_of_limit = Of the limit
share_of_all = Of all
memory_parameters = Parameters
memory_gradients = Gradients
memory_optimizer_state = Optimizer state
memory_activations_and_other = Activations and other
memory_offloaded = Offloaded to the host
memory_free = Free
memory_limit = Limit of the device
parameter_groups = Parameter groups
parameter_group = Group
numbers = Numbers
learning_rate = Learning rate
gpus = GPUs
gpu = GPU
index = Index
memory = Memory
driver = Driver
gpus_no_driver = no NVIDIA driver on this machine
gpus_no_package = the package nvidia-ml-py is missing
gpus_no_device = the NVIDIA driver shows no device
gpus_driver_hangs = the driver of the GPU does not answer
gpus_apple = GPU figures of Apple devices are not available
layers_none = Nothing was measured for single layers yet.
family_grad_norm = Gradient norm
family_grad_norm_hint = Norm of the gradients of each layer, before clipping. The colors are powers of ten.
family_grad_nonfinite = { legend_nonfinite }
family_grad_nonfinite_hint = How many values of a parameter's gradient are NaN or infinite.
family_update_ratio = Update ratio
family_update_ratio_hint = How much a step changes the weights, as a part of their norm. About 1e-3 is usual. The colors are powers of ten.
family_dead_share = Dead units
family_dead_share_hint = The share of a ReLU's units that are zero for a whole batch.
family_module_share = Time of modules
family_module_share_hint = The share of the forward pass that each module takes.
ranks_title = The ranks, most own work first
ranks_none = No rank has sent a step time yet.
own_work = Own work
own_work_hint = The step time less the wait for other ranks: in a joint step all ranks take equally long.
tab_stacks = Stacks
see_stacks = See the stacks
typical_rank = typical
over_median = Of the median
host_word = Host
stacks_title = Where the training threads stand
stacks_none = Nobody has asked for stacks yet.
all_ranks = All ranks
stream_all = { all }
stream_stdout = stdout
stream_stderr = stderr
console_search = Search lines, or /regex/
download = Download
bad_regex = This is not a regular expression: { $why }.
nothing_found = Nothing fits this search.
config_search = Search names and values
config_none = The run has reported nothing of its configuration.
copy_yaml = Copy as YAML
differs_from = What differs from { $run }
config_yours = Set by you
config_found = Found by perfagent
saves_adam_state = saves { $size } (gradients and moments of Adam)
saves_beside_bf16 = saves { $size } (weights, beside bf16)
saves_masks_kept = saves nothing while training: masks are kept beside the weights
config_code = Code
config_environment = Environment
config_packages = Packages

## Compare

compare_add = Add a run, or RUN:FROM-TO
compare_none = Name two runs above, or pick them on the page Runs. The others are compared with the first one.
compare_one = One run is there. Add another one, or a window of the same run, such as RUN:100-500.
compare_runs = Runs
compare_settings = What differs in settings
compare_charts = { tab_charts }
compare_steps = Steps
phase = Phase
baseline = baseline
only_here = only here: { $rules }
loss_near = Loss near step { $step }
loss_best = Lowest loss
best_in = { $value } in step { $step }
highest = Highest { $what }
interval = { $low } to { $high } %
setting = Setting
no_difference = No setting differs.
equal_settings = { $count ->
    [one] { $count } other entry is equal.
   *[other] { $count } other entries are equal.
}
influence = What the settings do
word_same = no difference found
word_too_short = too few steps for an interval
word_unknown = not known
change_faster = { $name } is { $percent } % faster than { $first } ({ $low } to { $high } %)
change_slower = { $name } is { $percent } % slower than { $first } ({ $low } to { $high } %)
change_faster_step = { $name } takes { $percent } % less time a step than { $first } ({ $low } to { $high } %)
change_slower_step = { $name } takes { $percent } % more time a step than { $first } ({ $low } to { $high } %)
change_about_faster = { $name } is about { $times } × faster than { $first }
change_about_slower = { $name } is about { $times } × slower than { $first }
change_unknown_of = { $count ->
    [one] Nothing says how fast { $count } other run is.
   *[other] Nothing says how fast { $count } other runs are.
}
compare_cut = { $most ->
    [one] Only the first of { $count } runs is compared.
   *[other] The first { $most } of { $count } runs are compared.
}
change_same = No difference in speed was found between { $name } and { $first }; any difference is at most { $most } %.
change_too_short = { $steps ->
    [one] { $name }: too few steps to say how fast it is. { $lacking } has { $steps } step with { $measure } after the warm-up; at least { $least } are needed.
   *[other] { $name }: too few steps to say how fast it is. { $lacking } has { $steps } steps with { $measure } after the warm-up; at least { $least } are needed.
}
change_grouped = { $steps ->
    [one] { $name }: too few steps to say how fast it is. { $lacking } has { $steps } step with { $measure } after the warm-up; slow steps come in groups, so they count as { $independent }; at least { $least } are needed.
   *[other] { $name }: too few steps to say how fast it is. { $lacking } has { $steps } steps with { $measure } after the warm-up; slow steps come in groups, so they count as { $independent }; at least { $least } are needed.
}
change_unknown = { $name }: nothing says how fast it is.
change_plain = { $told }.
change_why = { $told }: { $why }.
change_mean_only = The median step shows no such difference: the slow steps cause it.
change_median = By the median step, { $told }
change_median_unknown = There are too few steps to compare the median step.
mean = mean { $value }
change_shorter = { $phase } is { $seconds } a step shorter
change_longer = { $phase } is { $seconds } a step longer
gain_came = Predicted for “{ $rule }”: steps up to { $predicted } % shorter. In { $name }, which lacks this finding, they are { $measured } % shorter ({ $low } to { $high } %).
not_alike = Read speed and loss with care: { $what }.
not_alike_world_size = different numbers of processes
not_alike_batch_size = different batch sizes
not_alike_model = different models
log_in = Log in
log_out_title = Log out { $name }
settings_users = Users
settings_audit = Audit log
settings_account = My login
rule_setting_ignored = A stored setting is ignored: { $why }
may_not_set_rules = You may read the rules. Changing them needs an administrator of the project named here, or of all.
user_name = { name }
user_role = Role
user_project = { project }
user_password = Password
user_login = Login
user_used = Last login
user_add = Add
user_added = The user is there.
user_remove = Remove
user_removed = The user is removed, and every session of theirs is over.
user_disable = Disable
user_enable = Enable
user_disabled = disabled
user_changed = Done. It counts for open sessions, too.
users_none = No users. People can only log in with keys and with the admin token.
role_viewer = viewer: sees runs
role_operator = operator: also acts on alerts
role_admin = admin: also manages
role_in = { $role } of { $project }
no_role = no role
login_password = password
login_provider = identity provider
login_none = no password
audit_time = { tab_time }
audit_who = Who
audit_origin = { channel_url }
audit_action = Action
audit_thing = On what
thing_in = in { $project }
audit_detail = { details }
audit_none = Nothing of that kind was done.
audit_filter_who = Who, such as user ada
audit_filter_action = Action, such as run.delete
audit_more = Older
audit_newest = Newest
account_who = You are logged in as { $name }.
account_key = You are logged in with a key or the admin token: only a user has a password and sessions to show here.
account_nobody = Nobody is logged in: this server lets everybody on this machine read.
password_at_provider = You sign in at an identity provider: change your password there.
password_old = Current password
password_new = New password
password_set = Change the password
password_is_set = The password is changed. All your other sessions are over.
session_opened = Opened
session_origin = { channel_url }
session_agent = Browser
session_this = this one
session_end = { silence_end }
session_ended = The session is over.
own_sessions = Your sessions

## Notes, flame graphs and panels of one's own

cancel = Cancel
notes_change = Change
notes_menu = Add or change notes
notes_hint = Plain text; web addresses become links, and `backticks` code. Everybody who sees the run reads them.
flame = Flame graph
flame_thread = Thread
flame_training = Training thread
flame_backward = Backward thread
flame_gpu = GPU stream { $name }
flame_other = Thread { $name }
flame_hover = { $time }, { $share } % of the thread's time, { $calls } calls
flame_hint = What ran inside what, over all recorded steps. Click a block to enlarge it.
flame_left_out = { $count } shorter blocks are left out.
perfetto = Open in Perfetto
perfetto_title = Opens ui.perfetto.dev, which is not our site, in a new tab. Your browser hands it the trace alone.
perfetto_blocked = The browser blocked the new tab
perfetto_silent = Perfetto did not answer
section_own = Own panels
panel_add = Add a panel
panel_change = Change this panel
panel_delete = Delete this panel
panel_deleted = The panel “{ $title }” is deleted for all runs of the project.
panel_lines = Lines: a series, or an expression of several
panel_line = Line
panel_line_usual = train/loss - val/loss
panel_line_add = Add a line
panel_title = Title
panel_title_usual = as the lines
panel_hint = Put spaces around + − × ÷. Every run of the project that has these series shows the panel.
chart_note_menu = Annotate a step
chart_note = Annotation
chart_note_deleted = The annotation is deleted.
chart_notes = Annotations: { $count }
delete_word = Delete

## Sweeps: groups, what makes a run the best, saved views

group_by = Group by
by_group = Group
by_tag = Tag
goal = Which run is the best
goal_max = Highest { $name }
goal_min = Lowest { $name }
best = best
best_run = Best run
column_runs = Runs
column_worst = Worst verdict
no_group = without { $by }
no_value = none
group_open = Show the runs of this group
groups_more = { $count ->
    [one] And { $count } more group. Filter the runs to see it.
   *[other] And { $count } more groups. Filter the runs to see them.
}
groups_summary = { $runs ->
    [one] { $runs } run
   *[other] { $runs } runs
} in { $groups ->
    [one] { $groups } group
   *[other] { $groups } groups
}. Best first; ± is the standard deviation.
groups_runs = Show them as a table of runs
groups_no_best = No run has a value of what makes it the best.
runs_best = Best: { $name }, { $metric } { $figures }.
groups_best = { $count ->
    [one] Best: { $name }, { $metric } { $figures } in one run.
   *[other] Best: { $name }, { $metric } { $figures } over { $count } runs.
}
compare_groups = Compare these groups
compare_these = Compare these
change_same_of = { $count ->
    [one] { $first } and { $count } other run are equally fast: any difference is at most { $most } %.
   *[other] { $first } and { $count } other runs are equally fast: any difference is at most { $most } %.
}
band_how = Line: mean of a group's newest runs, 20 at most. Band: from the lowest to the highest of them.
parallel_how = Each line is a run. Draw along an axis to pick runs; click on it to let them go. Press its name to see it against the goal.
log_axis = { $name } (log)
parallel_all = { $count ->
    [one] { $count } run.
   *[other] { $count } runs.
}
parallel_picked = { $count } of { $all } runs picked.
parallel_newest = Of { $all } runs, the newest { $count } are looked at.
parallel_missing = { $count ->
    [one] { $count } without a finite { $name } is not drawn.
   *[other] { $count } without a finite { $name } are not drawn.
}
views = Views
views_none = No view is saved yet. A view is all that stands in the address: filters, groups, columns.
view_name = Name of the view
view_save = Save this view
view_saved = { $name } is saved.
view_there = There is a view { $name } already.
view_replace = Replace it
view_delete = Delete?
view_delete_title = Delete the view { $name }
view_deleted = { $name } is deleted.
