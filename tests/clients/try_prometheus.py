"""Prometheus: the metrics as its text format's parser reads them."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from trying import URL, attempt


def scrape() -> int:
    with urllib.request.urlopen(f"{URL}/metrics") as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    names = {family.name for family in families}
    assert {"chairlift:time_to_first_token_seconds", "chairlift:num_requests_running"} <= names
    return len(families)


attempt("the metrics page", scrape)
