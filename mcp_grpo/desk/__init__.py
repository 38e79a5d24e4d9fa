"""The desk: servers, an invented market, tasks and their reward. Nothing outside this folder imports it."""
