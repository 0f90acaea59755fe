"""Folders of the project that benchmarks read or write."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "data"
"""Trained models and texts beside the project, where they are at hand."""
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
RECORDED = ROOT / "benchmarks" / "recorded"
"""Pictures and numbers of recorded reports."""
