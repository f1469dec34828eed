"""Audio files as a model hears them: WAV, by its own feature extractor."""

from __future__ import annotations

import base64
import io
import wave
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from optkit.common.files import reading
from optkit.errors import SourceError
from optkit.source.quiet import quiet_transformers
from optkit.source.text_files import INLINE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Samples: TypeAlias = NDArray[np.float32]

SUFFIX = ".wav"
EXTRACTOR = "preprocessor_config.json"


class Ears:
    """The feature extractor of a model directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def heard(self, file: str | Path) -> Tensor:
        """Return the features of a WAV file or of its bytes behind `INLINE`, float [1, bins, frames].

        Raises SourceError for a file that is no WAV, of another sampling rate or too long.
        """
        return self._features(self._samples(file))

    def silence(self) -> Tensor:
        """Return the features of nothing to hear, float [1, bins, frames]."""
        import numpy as np

        return self._features(np.zeros(1, dtype=np.float32))

    @cached_property
    def _extractor(self) -> Any:
        remedy = f"Copy {EXTRACTOR} or processor_config.json from the model's source into it"
        with quiet_transformers(), reading(self.directory, "the feature extractor cannot be loaded", remedy):
            from transformers import AutoFeatureExtractor

            return AutoFeatureExtractor.from_pretrained(self.directory, local_files_only=True)

    def _features(self, samples: Samples) -> Tensor:
        found = self._extractor(samples, sampling_rate=self._extractor.sampling_rate, return_tensors="pt")
        features: Tensor = found["input_features"]
        return features

    def _samples(self, file: str | Path) -> Samples:
        samples, rate = read_wav(file)
        wanted = int(self._extractor.sampling_rate)
        if rate != wanted:
            what = f"{rate:,} samples a second, and the model hears {wanted:,}"
            raise SourceError(what, where=_place_of(file), remedy=f"Convert it: ffmpeg -i IN -ar {wanted} OUT.wav")
        longest = int(getattr(self._extractor, "n_samples", len(samples)))
        if len(samples) > longest:
            what = f"it lasts {len(samples) / rate:.1f} s, and the model hears {longest / rate:g} s at once"
            raise SourceError(
                what, where=_place_of(file), why="The rest would not be heard", remedy="Cut it into pieces"
            )
        return samples


def _place_of(file: str | Path) -> str:
    return "audio in a row" if str(file).startswith(INLINE) else str(file)


def read_wav(file: str | Path) -> tuple[Samples, int]:
    """Return the samples of a WAV file, float32 [samples] in -1 to 1, channels averaged, and their rate.

    Raises SourceError for what is no WAV file of whole numbers (PCM).
    """
    import numpy as np

    inline = str(file).startswith(INLINE)
    held = io.BytesIO(base64.b64decode(str(file).removeprefix(INLINE))) if inline else str(file)
    with reading(_place_of(file), "no WAV file of whole numbers (PCM)", "Convert it: ffmpeg -i IN OUT.wav"):
        with wave.open(held, "rb") as opened:
            width, channels, rate = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
            raw = np.frombuffer(opened.readframes(opened.getnframes()), dtype=np.uint8)
        if width == 1:
            values = raw.astype(np.float32) - 128
        else:  # the bytes of a sample become the upper ones of 32 bits
            values = np.zeros((len(raw) // width, 4), dtype=np.uint8)
            values[:, 4 - width :] = raw.reshape(-1, width)
            values = values.view("<i4")[:, 0].astype(np.float32) / 2.0 ** (8 * (4 - width))
        samples: Samples = (values / 2.0 ** (8 * width - 1)).reshape(-1, channels).mean(axis=1, dtype=np.float32)
        return samples, rate
