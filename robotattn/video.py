"""Roll-outs as pictures: an mp4 that is reopened and counted, and a filmstrip of a few moments.

Images are RGB everywhere inside; this file is the boundary where OpenCV gets its BGR.
"""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from robotattn.types import Observation

CODECS = ("vp09", "mp4v")  # VP9 plays in browsers; MPEG-4 part 2 is the fallback that every OpenCV build writes
PICTURE_HEIGHT = 240  # small cameras are enlarged to this height (px)
STRIP_SIDE = 160  # width of a filmstrip's pictures (px)
CAPTION_HEIGHT = 28  # (px)


class VideoError(RuntimeError):
    """A video could not be written, or does not hold the frames that were written."""


def bgr(image: np.ndarray) -> np.ndarray:
    """An RGB image ``[height, width, 3]`` as the contiguous BGR array that OpenCV expects, and the other way round."""
    return np.ascontiguousarray(image[..., ::-1])


def picture(observation: Observation, caption: str = "") -> np.ndarray:
    """All cameras of an observation side by side with a caption below: uint8 RGB, even height and width."""
    if not observation.images:
        raise VideoError("video: the observation has no camera image, allowed are environments with a camera")
    views = [_enlarged(image) for image in observation.images.values()]
    row = np.concatenate(views, axis=1)
    row = row[:, : row.shape[1] // 2 * 2]  # encoders that halve the colour planes need even sizes
    return np.concatenate([row, _caption(caption, row.shape[1])], axis=0) if caption else row


def _enlarged(image: np.ndarray) -> np.ndarray:
    width = round(image.shape[1] * PICTURE_HEIGHT / image.shape[0])
    return cv2.resize(image, (width, PICTURE_HEIGHT), interpolation=cv2.INTER_CUBIC)  # channel order does not matter


def _caption(text: str, width: int) -> np.ndarray:
    strip = np.full((CAPTION_HEIGHT, width, 3), 24, np.uint8)
    white, start = (235, 235, 235), (8, CAPTION_HEIGHT - 9)
    if hasattr(cv2, "FontFace"):  # OpenCV 5: a built-in font with Chinese characters
        cv2.putText(strip, text, start, white, cv2.FontFace("uni"), 14)
    elif text.isascii():  # the older font draws question marks for anything else
        cv2.putText(strip, text, start, cv2.FONT_HERSHEY_SIMPLEX, 0.42, white, 1, cv2.LINE_AA)
    return strip


def write(path: Path, frames: Sequence[np.ndarray], hz: float) -> int:
    """Write RGB frames of one size as mp4, reopen the file and count: returns the number of frames.

    Raises VideoError, naming the file, when no codec opens or the count differs.
    """
    if not frames:
        raise VideoError(f"{path}: no frame to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.stem + ".part.mp4")
    writer = _writer(partial, (frames[0].shape[1], frames[0].shape[0]), hz)
    for frame in frames:
        writer.write(bgr(frame))
    writer.release()
    found = count(partial)
    if found != len(frames):
        raise VideoError(f"{path}: {found} frames can be read back, {len(frames)} were written")
    partial.replace(path)
    return found


def _writer(path: Path, size: tuple[int, int], hz: float) -> cv2.VideoWriter:
    for codec in CODECS:
        writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter.fourcc(*codec), float(hz), size)
        if writer.isOpened():
            return writer
    raise VideoError(f"{path}: this OpenCV opens none of the codecs {', '.join(CODECS)}")


def read(path: Path) -> list[np.ndarray]:
    """All frames of a video as RGB arrays, by decoding each (the count in a file's header may be wrong)."""
    capture, frames = cv2.VideoCapture(str(path)), []
    while True:
        good, frame = capture.read()
        if not good:
            break
        frames.append(bgr(frame))
    capture.release()
    return frames


def count(path: Path) -> int:
    """Count the frames that can be decoded."""
    return len(read(path))


def filmstrip(observations: Sequence[Observation], columns: int = 6) -> np.ndarray:
    """Moments evenly spread over an episode, first and last included: one column each, cameras stacked; uint8 RGB."""
    if not observations:
        raise VideoError("filmstrip: no observation")
    chosen = np.linspace(0, len(observations) - 1, min(columns, len(observations))).round().astype(int)
    return np.concatenate([_column(observations[index]) for index in chosen], axis=1)


def _column(observation: Observation) -> np.ndarray:
    views = [_whole(image) for image in observation.images.values()]
    return np.concatenate([*views, _caption(f"{observation.time:.1f} s", views[0].shape[1])], axis=0)


def _whole(image: np.ndarray) -> np.ndarray:
    """All of an image, as wide as a column: what matters may lie at its border."""
    height = round(image.shape[0] * STRIP_SIDE / image.shape[1])
    return cv2.resize(image, (STRIP_SIDE, height), interpolation=cv2.INTER_CUBIC)


def write_png(path: Path, image: np.ndarray) -> None:
    """Write one RGB image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not cv2.imwrite(str(path), bgr(image)):
        raise VideoError(f"{path}: OpenCV could not write the image")
