"""Importance of an experiment's parameters: computed in a process of its own, one at a time, and cached."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict

from rubberband.executor.result import Result
from rubberband.views.charts import Figure
from rubberband.views.importance import importance_chart, question_of, to_json
from rubberband.views.search_charts import Space

_TIMEOUT_S = 60.0
_KEPT = 32
_answers: OrderedDict[str, dict[str, float]] = OrderedDict()
_answering = threading.Lock()


def cached_importance(result: Result, space: Space = None) -> Figure | str:
    """Return the chart, or in a sentence why there is none."""
    question = question_of(result, space)
    if isinstance(question, str):
        return question
    text = to_json(question)
    key = hashlib.sha256(text.encode()).hexdigest()
    found = _answers.get(key)
    if found is None:
        if not _answering.acquire(timeout=_TIMEOUT_S):
            return "The importance of parameters is being computed for other experiments; reload the page."
        try:
            found = _answers[key] = _answers.get(key) or _computed(text)
            while len(_answers) > _KEPT:
                _answers.popitem(last=False)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            return f"The importance of parameters cannot be computed: {_cause(error)}."
        finally:
            _answering.release()
    return importance_chart(found, question.note)


def _computed(text: str) -> dict[str, float]:
    command = [sys.executable, "-m", "rubberband.views.importance"]
    ran = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    shares: dict[str, float] = json.loads(ran.stdout)
    return shares


def _cause(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took longer than {_TIMEOUT_S:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip().rpartition("\n")[2] or "its process ended"
    return str(error)
