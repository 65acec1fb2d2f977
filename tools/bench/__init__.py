"""Offline throughput, beside a peer when asked (`actorium bench offline`)."""
