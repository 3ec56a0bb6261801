"""Sentiment of text as a reward: VADER's lexicon, and a classifier fitted to movie reviews.

They score only what the model wrote, not the prompt. All scores are in [-1, 1].
In YAML: `data.reward_fn: examples.sentiment_rewards:sadder`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trlx_like.errors import RewardError

if TYPE_CHECKING:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

WORD = re.compile(r"\b\w\w+\b")
INSTALL = "pip install -e '.[examples]'"


def vader_reward(outputs: Sequence[str], **_: object) -> list[float]:
    """Return VADER's compound score of each output: -1 sad, 0 neutral, 1 happy.

    Source: Hutto and Gilbert 2014, "VADER: a parsimonious rule-based model for sentiment analysis".
    """
    analyzer = _analyzer()
    return [float(analyzer.polarity_scores(output)["compound"]) for output in outputs]


def sadder(outputs: Sequence[str], **_: object) -> list[float]:
    """Reward sad text: minus `vader_reward`."""
    return [-score for score in vader_reward(outputs)]


def tfidf_reward(outputs: Sequence[str], **_: object) -> list[float]:
    """Return how much each output reads like a positive review: P(positive) - P(negative).

    The very first call fetches the reviews and fits the classifier, in about 20 CPU seconds; the classifier is kept.
    """
    return _review_classifier().scores(outputs)


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise RewardError(f"The VADER reward needs vaderSentiment: {INSTALL}") from error
    return SentimentIntensityAnalyzer()


@cache
def _review_classifier() -> TfidfClassifier:
    from examples.assets import cached, movie_reviews

    folder = cached("tfidf-movie-reviews", lambda path: TfidfClassifier.fit(*movie_reviews()).save(path))
    return TfidfClassifier.load(folder)


@dataclass
class TfidfClassifier:
    """Classify text by logistic regression on the TF-IDF of words and word pairs. Only fitting needs scikit-learn.

    The features are those of scikit-learn's `TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)`:
    (1 + ln count) * idf, scaled to length 1.
    """

    vocabulary: dict[str, int]  # term -> index of its feature
    idf: npt.NDArray[np.float64]  # [F]
    weights: npt.NDArray[np.float64]  # [F]
    bias: float

    @classmethod
    def fit(cls, texts: Sequence[str], labels: Sequence[int], min_texts: int = 5) -> TfidfClassifier:
        """Fit a classifier to labels (1 positive, 0 negative). Terms in fewer than `min_texts` texts are left out."""
        try:
            from sklearn.feature_extraction.text import TfidfVectorizer
            from sklearn.linear_model import LogisticRegression
        except ImportError as error:
            raise RewardError(f"Fitting the TF-IDF reward needs scikit-learn: {INSTALL}") from error
        vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=min_texts, sublinear_tf=True)
        features = vectorizer.fit_transform(texts)
        regression = LogisticRegression(C=10, solver="liblinear").fit(features, labels)
        vocabulary = {term: int(place) for term, place in vectorizer.vocabulary_.items()}
        return cls(
            vocabulary, np.asarray(vectorizer.idf_, np.float64), regression.coef_[0], float(regression.intercept_[0])
        )

    def scores(self, texts: Sequence[str]) -> list[float]:
        """Return P(positive) - P(negative) of each text, in [-1, 1]."""
        return [math.tanh(self._log_odds(text) / 2) for text in texts]

    def _log_odds(self, text: str) -> float:
        words = WORD.findall(text.lower())
        counts = Counter([*words, *(" ".join(pair) for pair in pairwise(words))])
        known = [(self.vocabulary[term], count) for term, count in counts.items() if term in self.vocabulary]
        if not known:
            return self.bias
        places, values = np.array(known).T
        features = (1 + np.log(values)) * self.idf[places]
        return float(features @ self.weights[places] / np.linalg.norm(features)) + self.bias

    def save(self, folder: Path) -> None:
        """Write terms.json and weights.npz."""
        folder.mkdir()
        (folder / "terms.json").write_text(json.dumps(self.vocabulary), encoding="utf-8")
        np.savez(folder / "weights.npz", idf=self.idf, weights=self.weights, bias=self.bias)

    @classmethod
    def load(cls, folder: Path) -> TfidfClassifier:
        """Load a classifier that `save` wrote."""
        vocabulary = json.loads((folder / "terms.json").read_text(encoding="utf-8"))
        with np.load(folder / "weights.npz", allow_pickle=False) as arrays:
            return cls(vocabulary, arrays["idf"], arrays["weights"], float(arrays["bias"]))
