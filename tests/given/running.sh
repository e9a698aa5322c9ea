# The server has a run with the id RUN, which still trains, and may be stopped.
PERFAGENT_RUN_ID=RUN python "$GIVEN/training.py" 60 > train.log 2>&1 &
until grep -q training train.log; do sleep 0.2; done
