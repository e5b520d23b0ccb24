"""Small data sets in the formats of those that fastai's lessons download: ``fastai_data.py FOLDER``.

With ``FASTAI_HOME=FOLDER`` and ``TORCH_HOME=FOLDER/torch`` in the environment, ``untar_data(URLs.PETS)`` and
``vision_learner(dls, resnet18)`` find what they would download, and nothing is asked of the network. Each set has
something to learn: factors of users and movies, shapes and colours, words of praise. The weights are random.
"""

from __future__ import annotations

import csv
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = ["#d02020", "#2040d0", "#20a040", "#e0b010", "#9030b0", "#10a0b0", "#f07020", "#f090c0", "#704010", "#e8e8e8"]
SHAPES = ["ellipse", "square", "triangle", "cross", "ring", "bars"]
PRAISE, BLAME = ["wonderful", "great", "moving", "superb"], ["awful", "boring", "terrible", "dull"]
THINGS = ["movie", "film", "story", "cast", "music", "ending", "script", "actor"]


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, colour: str, x: float, y: float, r: float) -> None:
    """Draw one shape about the point (`x`, `y`); `r` is half its width."""
    if shape == "ellipse":
        draw.ellipse((x - r, y - 0.8 * r, x + r, y + 0.8 * r), fill=colour)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "triangle":
        draw.polygon([(x - r, y + r), (x, y - r), (x + r, y + r)], fill=colour)
    elif shape == "cross":
        draw.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=colour)
        draw.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=colour)
    elif shape == "ring":
        draw.ellipse((x - r, y - r, x + r, y + r), outline=colour, width=max(2, int(r / 3)))
    else:
        for i in (-1.0, -0.2, 0.6):
            draw.rectangle((x - r, y + i * r, x + r, y + (i + 0.4) * r), fill=colour)


def _new_picture(rng: random.Random, width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return a new picture with a grey, speckled background, and an object that draws on it."""
    grey = np.random.default_rng(rng.randrange(2**32)).normal(rng.uniform(90, 150), 20, (height, width, 1))
    image = Image.fromarray(np.repeat(grey.clip(0, 255).astype(np.uint8), 3, axis=2))
    return image, ImageDraw.Draw(image)


def _one_shape(rng: random.Random, shape: str, colour: str, width: int, height: int) -> Image.Image:
    """Return a picture of one shape near the middle."""
    image, draw = _new_picture(rng, width, height)
    r = min(width, height) * rng.uniform(0.25, 0.35)
    _draw_shape(draw, shape, colour, width * rng.uniform(0.4, 0.6), height * rng.uniform(0.4, 0.6), r)
    return image


def write_ml_100k(path: Path, n_users: int = 100, n_movies: int = 120, n_ratings: int = 3000) -> None:
    """Write MovieLens 100k: ``u.data``, ``u.item``.

    Ratings come from two factors; some movies have only one rating.
    """
    rng = np.random.default_rng(8)
    users, movies = rng.normal(0, 0.7, (n_users, 2)), rng.normal(0, 0.7, (n_movies, 2))
    liked = rng.normal(3.2, 0.8, n_movies)
    pairs = rng.choice(n_users * (n_movies - 20), n_ratings - 20, replace=False)
    seen = [divmod(int(pair), n_movies - 20) for pair in pairs] + [(i, n_movies - 20 + i) for i in range(20)]
    rng.shuffle(seen)
    with (path / "u.data").open("w") as file:
        for user, movie in seen:
            score = liked[movie] + users[user] @ movies[movie] + rng.normal(0, 0.3)
            rating = int(np.clip(round(score), 1, 5))
            file.write(f"{user + 1}\t{movie + 1}\t{rating}\t{874724710 + int(rng.integers(10**7))}\n")
    first, second = ["Été", "Night", "Garçon", "River", "Señor", "Winter", "House", "Journey"], ["Blue", "Last", "Über"]
    with (path / "u.item").open("w", encoding="latin-1") as file:
        for i in range(n_movies):
            year = 1960 + i % 38
            title = f"{first[i % 8]}, The {second[i % 3]} {i + 1} ({year})"
            genres = "|".join(str(int(genre == i % 19)) for genre in range(19))
            file.write(f"{i + 1}|{title}|01-Jan-{year}||http://us.imdb.com/M/title-exact?{i + 1}|{genres}\n")


def write_movie_lens_sample(path: Path, n: int = 1500) -> None:
    """Write a sample of MovieLens: ``ratings.csv``."""
    rng = np.random.default_rng(2)
    users, movies, liked = rng.normal(0, 0.6, (40, 2)), rng.normal(0, 0.6, (60, 2)), rng.normal(3.2, 0.8, 60)
    with (path / "ratings.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["userId", "movieId", "rating", "timestamp"])
        for pair in rng.choice(40 * 60, n, replace=False):
            user, movie = divmod(int(pair), 60)
            rating = np.clip(round(2 * (liked[movie] + users[user] @ movies[movie])) / 2, 0.5, 5.0)
            table.writerow([7 * user + 2, 13 * movie + 1, rating, 1097894241 + int(pair)])


def write_oxford_iiit_pet(path: Path, each: int = 30) -> None:
    """Write Oxford-IIIT pets: ``images/great_pyrenees_173.jpg``.

    A capital letter means a cat, and a warm colour.
    """
    rng = random.Random(5)
    breeds = ["Abyssinian", "Egyptian_Mau", "Siamese", "beagle", "great_pyrenees", "pug"]
    colours = ["#d02020", "#f07020", "#e0b010", "#2040d0", "#10a0b0", "#20a040"]
    (path / "images").mkdir()
    for i, breed in enumerate(breeds):
        for number in rng.sample(range(1, 201), each):
            image = _one_shape(rng, SHAPES[i], colours[i], 160, rng.choice([120, 128]))
            image.save(path / "images" / f"{breed}_{number}.jpg")


def write_imdb(path: Path, each: int = 60) -> None:
    """Write IMDb reviews: ``train/pos/0_9.txt``, ``test/neg`` and ``unsup``. Words carry the sentiment."""
    rng = random.Random(10)
    words = {"pos": PRAISE, "neg": BLAME}
    for folder, n in {"train/pos": each, "train/neg": each, "test/pos": 12, "test/neg": 12, "unsup": 8}.items():
        (path / folder).mkdir(parents=True)
        for i in range(n):
            kind = folder.split("/")[-1] if "/" in folder else rng.choice(["pos", "neg"])
            sentences = [f"The {rng.choice(THINGS)} was {rng.choice(words[kind])}" for _ in range(rng.randrange(1, 3))]
            number = {"pos": rng.randrange(7, 11), "neg": rng.randrange(1, 5)}[kind] if "/" in folder else 0
            (path / folder / f"{i}_{number}.txt").write_text(".<br /><br />".join(sentences) + ".")


def write_adult_sample(path: Path, n: int = 2000) -> None:
    """Write the adult data set: ``adult.csv``, with blanks before categories and some missing values."""
    rng = random.Random(9)
    schools = {"HS-grad": 9, "Some-college": 10, "Assoc-acdm": 12, "Bachelors": 13, "Masters": 14, "Doctorate": 16}
    columns = ["age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"]
    columns += ["relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"]
    with (path / "adult.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*columns, "salary"])
        for _ in range(n):
            age, school, hours = rng.randrange(17, 80), rng.choice(list(schools)), rng.choice([20, 40, 40, 50, 60])
            married, sex = rng.random() < 0.5, rng.choice([" Male", " Female"])
            score = (schools[school] - 11) / 2 + (hours - 42) / 10 + (1.5 if married else -1.5) + (age - 45) / 20
            relation = " Not-in-family" if not married else " Husband" if sex == " Male" else " Wife"
            row = [age, " " + rng.choice(["Private", "State-gov", "Self-emp-inc", "?"]), rng.randrange(20000, 400000)]
            row += [" " + school, "" if rng.random() < 0.02 else float(schools[school])]
            row += [" Married-civ-spouse" if married else " Never-married"]
            row += ["" if rng.random() < 0.02 else " " + rng.choice(["Sales", "Tech-support", "Craft-repair"])]
            row += [relation, " " + rng.choice(["White", "Black", "Asian-Pac-Islander"]), sex]
            row += [rng.choice([0, 0, 0, 7688]), rng.choice([0, 0, 0, 1902]), hours, " United-States"]
            table.writerow([*row, ">=50k" if score + rng.gauss(0, 0.5) > 0 else "<50k"])


def write_pascal_2007(path: Path, n: int = 200) -> None:
    """Write PASCAL VOC 2007: ``train.csv`` with fname, labels, is_valid; pictures in ``train``.

    Labels are separated by blanks.
    """
    rng = random.Random(6)
    labels = ["bicycle", "bird", "car", "chair", "dog", "person"]
    (path / "train").mkdir()
    with (path / "train.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["fname", "labels", "is_valid"])
        for i in range(n):
            image, draw = _new_picture(rng, 160, 128)
            present = rng.sample(range(len(labels)), rng.choice([1, 1, 2, 3]))
            places = rng.sample([(40, 36), (120, 36), (40, 92), (120, 92)], len(present))
            for label, (x, y) in zip(present, places, strict=True):
                _draw_shape(draw, SHAPES[label], COLOURS[label], x, y, rng.uniform(24, 34))
            image.save(path / "train" / f"{5 + 2 * i:06}.jpg")
            table.writerow([f"{5 + 2 * i:06}.jpg", " ".join(labels[label] for label in present), i % 4 == 0])


def write_imagenette2(path: Path) -> None:
    """Write Imagenette: ten classes of ImageNet, ``train/n01440764/n01440764_10026.JPEG``, and ``val``."""
    rng = random.Random(7)
    names = ["n01440764", "n02102040", "n02979186", "n03000684", "n03028079"]
    names += ["n03394916", "n03417042", "n03425413", "n03445777", "n03888257"]
    for folder, each in {"train": 16, "val": 5}.items():
        for i, name in enumerate(names):
            (path / folder / name).mkdir(parents=True)
            for number in rng.sample(range(20000), each):
                image = _one_shape(rng, SHAPES[i % len(SHAPES)], COLOURS[i], 160, rng.choice([128, 144]))
                image.save(path / folder / name / f"{name}_{number}.JPEG")


def write_wt103_fwd(path: Path) -> None:
    """Write the language model of AWD_LSTM, untrained: ``lstm_fwd.pth``, ``itos_wt103.pkl``."""
    import torch
    from fastai.text.all import AWD_LSTM, defaults, get_language_model

    torch.manual_seed(0)
    vocab = [*defaults.text_spec_tok, *PRAISE, *BLAME, *THINGS, "the", "was", "a", "and", ".", ","]
    with (path / "itos_wt103.pkl").open("wb") as file:
        pickle.dump(vocab, file)
    weights = get_language_model(AWD_LSTM, len(vocab)).state_dict()
    for name, values in weights.items():  # large enough that the output depends on the words
        values *= 2 if "rnns" in name else 10 if name.endswith("weight") else 1
    torch.save(weights, path / "lstm_fwd.pth")


def write_resnet_weights(path: Path) -> None:
    """Write weights of torchvision's resnet18, named as in its URL.

    They are random, with the statistics that batch norm needs.
    """
    import torch
    from torchvision.models import ResNet18_Weights, resnet18

    torch.manual_seed(0)
    rng = random.Random(0)
    model = resnet18()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # average over all batches
    pictures = [_one_shape(rng, rng.choice(SHAPES), rng.choice(COLOURS), 96, 96) for _ in range(32)]
    batch = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in pictures]) / 255
    with torch.no_grad():
        model((batch - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / 0.225)
    torch.save(model.state_dict(), path / Path(ResNet18_Weights.DEFAULT.url).name)


def write_missing(home: Path) -> None:
    """Fill `home`, which becomes FASTAI_HOME, with all missing data sets and weights."""
    sets: dict[str, Callable[[Path], None]] = {
        "data/ml-100k": write_ml_100k,
        "data/movie_lens_sample": write_movie_lens_sample,
        "data/oxford-iiit-pet": write_oxford_iiit_pet,
        "data/imdb": write_imdb,
        "data/adult_sample": write_adult_sample,
        "data/pascal_2007": write_pascal_2007,
        "data/imagenette2": write_imagenette2,
        "models/wt103-fwd": write_wt103_fwd,
        "torch/hub/checkpoints": write_resnet_weights,
    }
    for name, fill in sets.items():
        if not (home / name).exists():
            (home / name).mkdir(parents=True)
            fill(home / name)


if __name__ == "__main__":
    write_missing(Path(sys.argv[1]))
