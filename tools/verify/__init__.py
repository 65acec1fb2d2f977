"""`actorium verify`: makes an engine contradict itself, if it can. `conditions`, `verify_cases`,
`contradictions`, `verify_plan`, `shrinking` are pure; `own_engines` and `server_asker` ask."""
