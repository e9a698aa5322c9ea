"""`perfagent sync`: sends what was recorded offline and what dead processes left."""
