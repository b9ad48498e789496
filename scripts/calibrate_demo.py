"""Makes the calibration that ships with the demo model.

    python scripts/calibrate_demo.py --data DIR

DIR holds stories_a.txt and stories_c.txt of the TinyStories data set. Calibrated is on the stories that the training of
the demo model held out, so that neither maps nor metrics rest on texts that the model has learnt. The result is keyed
by checksums of the checkpoint, and fits the store that any machine makes of it.
"""

import argparse
import time
from pathlib import Path

from stories import read_stories, without_held_out

from hetero_ee import Engine
from hetero_ee.calibration.file import write_calibration
from hetero_ee.calibration.location import SHIPPED_FOLDER, checkpoint_key
from hetero_ee.calibration.run import CalibrationRun, CalibrationSettings
from hetero_ee.calibration.texts import text_chunks
from hetero_ee.config import demo_model_folder
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.quantization import Quantization

TEXTS = ("stories_a.txt", "stories_c.txt")
HELD_OUT_EVERY = 80  # as scripts/train_demo_model.py has it
ENOUGH_TOKENS = 10**6  # all there are
DESCRIPTION = "TinyStories that training held out"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the stories")
    data = parser.parse_args().data
    model = demo_model_folder()
    with Engine.from_pretrained(threads=1, profile="off") as engine:
        tokenizer = Tokenizer.load(model, engine.spec.vocab_size)
        _, stories = without_held_out(read_stories([data / name for name in TEXTS]), HELD_OUT_EVERY)
        chunks = text_chunks(tokenizer, stories, ENOUGH_TOKENS, engine.context_tokens)
        run = CalibrationRun(engine.executor, CalibrationSettings(), None, time.perf_counter)
        start_s = time.perf_counter()
        calibration = run.calibrate(chunks, DESCRIPTION)
        seconds = time.perf_counter() - start_s
    folder = model / SHIPPED_FOLDER
    write_calibration(calibration, checkpoint_key(model, Quantization.of_model(model, None)), folder)
    n_bytes = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{calibration.text.n_tokens} tokens, {seconds:.0f} s, {n_bytes} bytes in {folder}")


if __name__ == "__main__":
    main()
