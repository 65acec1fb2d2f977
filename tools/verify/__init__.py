"""`actorium verify`: makes an engine contradict itself, if it can. `conditions`, `verify_cases`,
`contradictions`, `verify_cases`, `shrinking` are pure; `own_engines` and `http_readers` ask."""
