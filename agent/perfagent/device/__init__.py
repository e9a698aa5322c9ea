"""What the agent asks of a device, whatever kind it is. Nothing here waits for a device on the training thread."""

from perfagent.device.backends import *  # noqa: F403 - what differs from kind to kind
from perfagent.device.clock import *  # noqa: F403 - time
from perfagent.device.readings import *  # noqa: F403 - values on their way
