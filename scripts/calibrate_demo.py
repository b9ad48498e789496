"""Makes the calibration that ships with the demo model, and the certificate of its exits.

    python scripts/calibrate_demo.py --data DIR [--certify-only]

DIR holds stories_a.txt, stories_b.txt and stories_c.txt of the TinyStories data set. Calibrated is on the stories that
the training of the demo model held out, so that neither maps nor metrics rest on texts that the model has learnt. Those
are too few to certify on: its prompts are the beginnings of stories in stories_b.txt, behind the part that measurements
use. Both are keyed by checksums of the checkpoint, and fit the store that any machine makes of it.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from stories import SEPARATOR, read_stories, without_held_out

from hetero_ee import Engine
from hetero_ee.calibration.certificate_file import write_certificate
from hetero_ee.calibration.certify import N_PROMPTS, CertificateRun, by_group, specee_depths
from hetero_ee.calibration.file import read_calibration, write_calibration
from hetero_ee.calibration.location import SHIPPED_FOLDER, checkpoint_key
from hetero_ee.calibration.run import CalibrationRun, CalibrationSettings
from hetero_ee.calibration.texts import text_chunks, text_prompts
from hetero_ee.config import demo_model_folder
from hetero_ee.decoding.generation_defaults import GenerationDefaults
from hetero_ee.decoding.requests import Ending
from hetero_ee.text.tokenizer import Tokenizer
from hetero_ee.weights.quantization import Quantization

TEXTS = ("stories_a.txt", "stories_c.txt")
TEXT_TO_CERTIFY = "stories_b.txt"
MEASURED_CHARACTERS = 600_000  # its first ones
HELD_OUT_EVERY = 80  # as scripts/train_demo_model.py has it
ENOUGH_TOKENS = 10**6  # all there are
DESCRIPTION = "TinyStories that training held out"
CERTIFIED_ON = "TinyStories never trained on"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the stories")
    parser.add_argument("--certify-only", action="store_true", help="keep the calibration that is there")
    given = parser.parse_args()
    model = demo_model_folder()
    folder, key = model / SHIPPED_FOLDER, checkpoint_key(model, Quantization.of_model(model, None))
    _, held_out = without_held_out(read_stories([given.data / name for name in TEXTS]), HELD_OUT_EVERY)
    unseen = (given.data / TEXT_TO_CERTIFY).read_text("utf-8", errors="ignore")[MEASURED_CHARACTERS:]
    stories = [story.strip() for story in unseen.split(SEPARATOR)[1:]]
    with Engine.from_pretrained(threads=1, profile="off") as engine:
        tokenizer = Tokenizer.load(model, engine.spec.vocab_size)
        ending = Ending(GenerationDefaults.read(model).eos_token_ids(tokenizer), engine.context_tokens)
        start_s = time.perf_counter()
        if not given.certify_only:
            chunks = text_chunks(tokenizer, held_out, ENOUGH_TOKENS, engine.context_tokens)
            run = CalibrationRun(engine.executor, CalibrationSettings(), None)
            made = run.calibrate(chunks, DESCRIPTION)
            depths = specee_depths(engine.executor, ending, made, chunks)
            write_calibration(replace(made, specee_depths=depths), key, folder)
        calibration = read_calibration(folder, engine.spec, key)
        assert calibration is not None
        prompts = text_prompts(tokenizer, stories, N_PROMPTS, engine.context_tokens)
        certifying = CertificateRun(engine.executor, ending, calibration, None, time.perf_counter, print)
        write_certificate(certifying.certify(by_group(prompts), N_PROMPTS, key, CERTIFIED_ON), folder)
        seconds = time.perf_counter() - start_s
    n_bytes = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{calibration.text.n_tokens} tokens, {N_PROMPTS} prompts, {seconds:.0f} s, {n_bytes} bytes in {folder}")


if __name__ == "__main__":
    main()
