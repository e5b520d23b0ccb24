"""Every kind of learner trains on ranks, and answers afterwards as in a single process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import ddip

from .test_fastai import same_on_all_ranks

pytest.importorskip("fastai")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.grid

PICTURES = """
from fastai.vision.all import *
import matplotlib; matplotlib.use("agg")
def pictures(folder, n=18):
    rng = np.random.default_rng(0)
    (folder / "pictures").mkdir(parents=True); (folder / "masks").mkdir()
    for i in range(n):
        mask = np.zeros((32, 32), dtype=np.uint8)
        mask[:, : 8 + i % 16] = 1
        pixels = rng.integers(0, 100, (32, 32, 3)) + 120 * mask[..., None]
        PILImage.create(pixels.astype(np.uint8)).save(folder / "pictures" / f"{'wide' if i % 2 else 'slim'}_{i}.png")
        PILImage.create(mask).save(folder / "masks" / f"{i}.png")
"""
CLASSIFIER = """
files = get_image_files(folder / "pictures").sorted()
dls = ImageDataLoaders.from_name_re(folder, files, r"^(.*)_", valid_pct=0.4, bs=4, num_workers=0)
learn = vision_learner(dls, models.resnet18, pretrained=False, metrics=[error_rate, RocAucBinary()], concat_pool=False)
"""
SEGMENTER = """
files = get_image_files(folder / "pictures").sorted()
dls = SegmentationDataLoaders.from_label_func(
    folder, files, lambda f: folder / "masks" / f"{f.stem.split('_')[1]}.png", codes=["back", "front"], valid_pct=0.4,
    bs=4, num_workers=0)
learn = unet_learner(dls, models.resnet18, pretrained=False, metrics=[Dice(), DiceMulti(), foreground_acc])
"""
SPOKEN = """
from fastai.text.all import *
small = dict(emb_sz=12, n_hid=24, n_layers=2)
words = "a good film about bad trains and slow ships that nobody saw".split()
df = pd.DataFrame({"text": [" ".join(np.random.RandomState(i).choice(words, 12 + i % 5)) for i in range(60)]})
df["label"] = df.text.map(lambda text: int(text.count("good") > 0))
"""
LANGUAGE = """
dls = TextDataLoaders.from_df(df, text_col="text", is_lm=True, bs=4, seq_len=8, valid_pct=0.3, tok_tfm=BaseTokenizer())
config = dict(awd_lstm_lm_config, **small)
learn = language_model_learner(dls, AWD_LSTM, pretrained=False, config=config, metrics=[accuracy, Perplexity()])
"""
TEXT = """
dls = TextDataLoaders.from_df(df, text_col="text", label_col="label", bs=8, valid_pct=0.3, tok_tfm=BaseTokenizer())
config = dict(awd_lstm_clas_config, **small)
learn = text_classifier_learner(dls, AWD_LSTM, pretrained=False, config=config, metrics=[accuracy, F1Score()])
"""


@pytest.fixture(scope="module")
def group(warmed_up: None) -> Iterator[ddip.Group]:
    with ddip.Group(3, app="fastai", timeout=120) as group:
        group.run("""
            missing = ""
            try: import fastai.vision.all
            except (ImportError, RuntimeError) as error: missing = str(error)
        """)
        if missing := group.pull(["missing"])["missing"]:
            pytest.skip(f"fastai.vision cannot be imported here: {missing}")
        yield group


EQUAL = """
from ddip.apps import fastai as _app
learn.fit_one_cycle(1, 1e-3)
weights = [value.clone() for value in learn.model.state_dict().values()]
def ask(): return list(learn.validate()), learn.get_preds(with_loss=True, reorder=not hasattr(dls.train, "seq_len"))
together = ask()
import os
_app.release()  # each rank by itself, with fastai as it is in one process
place = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
try: alone = ask()
finally:
    os.environ.update(place)
    _app.prepare()
"""
COMPARE = """
def close(one, other):
    if isinstance(one, (list, tuple)): return len(one) == len(other) and all(map(close, one, other))
    return torch.allclose(torch.as_tensor(one).float(), torch.as_tensor(other).float(), atol=1e-5)
told = close(together, alone)
"""


AFTER = {
    "vision": """
        learn.tta(n=2)
        interpretation = ClassificationInterpretation.from_learner(learn)
        interpretation.plot_confusion_matrix(); interpretation.plot_top_losses(2); interpretation.most_confused()
        learn.show_results(max_n=2); learn.recorder.plot_loss(); learn.summary(); learn.predict(files[0])
        learn.fine_tune(1)
    """,
    "unet": "learn.show_results(max_n=2)",
    "language model": "learn.predict('a good', 3); learn.lr_find(num_it=20, stop_div=False, show_plot=False)",
    "text classifier": "learn.freeze_to(-2); learn.fit(1); learn.predict('a good film')",
}
LEARNERS = {
    "vision": (PICTURES, CLASSIFIER),
    "unet": (PICTURES, SEGMENTER),
    "language model": (SPOKEN, LANGUAGE),
    "text classifier": (SPOKEN, TEXT),
}


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_learner_trains_and_reports_like_one_process(group: ddip.Group, tmp_path: Path, kind: str) -> None:
    data, learner = LEARNERS[kind]
    group.run(f"import warnings; warnings.simplefilter('ignore')\n{data}\nfolder = Path({str(tmp_path / 'data')!r})")
    if data is PICTURES:
        group.run("pictures(folder)", ranks=[0])
    group.run(learner)
    group.run(EQUAL + COMPARE)
    assert same_on_all_ranks(group, "told") is True
    assert len(same_on_all_ranks(group, "weights")) > 0
    group.run(AFTER[kind])
    same_on_all_ranks(group, "[value for value in learn.model.state_dict().values()]")
