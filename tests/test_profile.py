import pytest

from kvlab import engine, geometry, load_grid, overview, predict, profile_file
from kvlab.errors import ConfigError
from kvlab.profile import FOLDER, Variant, built_in, check_fits, choose, load_profile
from kvlab.provenance import Hardware


def hardware(*gpus):
    found = tuple({"name": name, "memory_bytes": int(gib * 2**30)} for name, gib in gpus)
    return Hardware(found, cores=2, memory_bytes=2**34, has_vllm=True, vllm_version="0.31.0", engine="cpu")


@pytest.fixture
def own(tmp_path):
    """A copy of the CPU profile, changed by text; returns its path."""

    def write(*changes):
        text = (FOLDER / "cpu-tiny.toml").read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        path = tmp_path / "own.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("name", built_in())
def test_every_built_in_profile_loads_and_is_complete(name):
    profile = load_profile(name)
    assert profile.name == name
    shape = geometry.load(profile.geometry)
    for server in (profile.server, *(profile.server_with(v.set) for v in profile.kv_capacity.servers)):
        assert server.kv_cache_memory_bytes and server.block_size and server.max_model_len  # pitfall 19, pitfall 20
        size = predict.kv_dtype_bytes(shape, server.kv_cache_dtype, server.dtype)
        per_token = predict.kv_bytes_per_token(shape, size)
        blocks = predict.num_blocks(server.kv_cache_memory_bytes, per_token, server.block_size)
        assert predict.longest_model_len(blocks, server.block_size) >= server.max_model_len  # else vLLM will not start


@pytest.mark.parametrize("name", built_in())
def test_every_load_goes_on_to_twice_the_clients_beyond_its_pool(name):
    profile = load_profile(name)
    server, load = profile.server_with(profile.load.server), profile.load.shapes[0]
    size = predict.kv_dtype_bytes(geometry.load(profile.geometry), server.kv_cache_dtype, server.dtype)
    per_token = predict.kv_bytes_per_token(geometry.load(profile.geometry), size)
    blocks = predict.num_blocks(server.kv_cache_memory_bytes, per_token, server.block_size)
    fits = predict.requests_that_fit(blocks, load.input_tokens, load.output_tokens, server.block_size)
    assert predict.doubled_beyond(load.concurrency, fits.high)


@pytest.mark.parametrize("name", built_in())
def test_every_request_of_a_profile_fits_its_server(name):
    profile = load_profile(name)
    longest = max(s.tokens for s in profile.load.shapes)
    assert longest <= profile.server_with(profile.load.server).max_model_len
    prefix = profile.prefix_cache
    assert prefix.prefix_tokens + prefix.tail_tokens + 1 <= profile.server_with(prefix.server).max_model_len
    assert prefix.requests > prefix.prefixes
    for variant in profile.kv_capacity.servers:
        size = profile.kv_capacity.input_tokens + profile.kv_capacity.output_tokens
        assert size <= profile.server_with(variant.set).max_model_len
    # The step-time model needs three points below its limit, and something above it to predict.
    low = [c for s in profile.load.shapes for c in s.concurrency if c <= profile.load.fit_up_to]
    assert len(low) >= 3 and max(c for s in profile.load.shapes for c in s.concurrency) > profile.load.fit_up_to


def test_an_own_file_is_read(own):
    path = own(("rounds = 2", "rounds = 3"), ('name = "cpu-tiny"', 'name = "mine"'))
    assert (load_profile(path).name, load_profile(path).load.shapes[0].rounds) == ("mine", 3)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("rounds = 2", "runds = 2"), "load.shapes.0.runds"),
        (("max_num_seqs = 64", 'max_num_seqs = "64"'), "server.max_num_seqs"),
        (("max_num_seqs = 64", "max_num_seqs = 64.0"), "server.max_num_seqs"),
        (("enforce_eager = true", "enforce_eager = 1"), "server.enforce_eager"),
        (("burst = 16", "burst = 0"), "kv_capacity.burst"),
        (("burst = 16\n", "\n"), "kv_capacity.burst"),
        (("concurrency = [1, 4]", "concurrency = []"), "load.shapes.1.concurrency"),
        (('engine = "cpu"', 'engine = "gpu"'), "server.engine"),
        (("[load]", "[lode]"), "lode"),
    ],
)
def test_a_wrong_field_is_named(own, change, field):
    with pytest.raises(ConfigError) as caught:
        load_profile(own(change))
    text = str(caught.value)
    assert f"  {field}: " in text and "own.toml" in text and "Next:" in text


def test_bad_toml_names_the_line(own):
    path = own(("[load]", "[load"))
    with pytest.raises(ConfigError, match=r"own.toml is not valid TOML: .*line \d+"):
        load_profile(path)


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    path = tmp_path / "own.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_profile(str(path))


@pytest.mark.parametrize("name", ["cpu-tyni", "", "no/such/file.toml", "."])
def test_an_unknown_profile_lists_the_known_ones(name):
    with pytest.raises(ConfigError) as caught:
        load_profile(name)
    assert all(known in str(caught.value) for known in ("auto", *built_in()))


def test_changes_to_the_server_are_strict():
    profile = load_profile("cpu-tiny")
    assert profile.server_with({"block_size": 64}).block_size == 64
    assert profile.server_with({}) == profile.server
    for wrong in ({"blocksize": 64}, {"block_size": "64"}, {"block_size": None, "model": 3}):
        with pytest.raises(ConfigError, match="the server of profile cpu-tiny"):
            profile.server_with(wrong)


def test_a_variant_with_a_wrong_flag_is_found_when_the_profile_is_read(own):
    with pytest.raises(ConfigError, match="kv_cache_dtyp"):
        load_profile(own(('kv_cache_dtype = "fp8"', 'kv_cache_dtyp = "fp8"')))
    assert Variant(name="a").set == {}


@pytest.mark.parametrize("name", ["gpu-8gb", "h200"])
def test_a_gpu_profile_has_builds_with_weights_of_8_bits_and_with_lora_and_check_names_them(
    name, monkeypatch, tmp_path
):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    profile = load_profile(name)
    servers = {v.name: profile.server_with(profile.load.server | v.set) for v in profile.load.variants}
    flags = {build: set(engine.to_argv(server, "model", 8000)) for build, server in servers.items()}
    assert {"--quantization", "fp8"} <= flags["fp8-weights"] and "--enable-lora" in flags["lora"]
    told = overview.text(name, "")[0]
    assert all(build in told for build in servers) and "other builds of the model" in told


@pytest.mark.parametrize("name", ["gpu-8gb", "h200"])
def test_a_gpu_profile_compares_graphs_with_eager_on_three_sizes_of_model(name):
    """What graphs are worth depends on the size: a small model waits for its launches, a large one hides them."""
    profile = load_profile(name)
    sizes = [geometry.load(model.geometry).params for model in profile.cuda_graphs.models]
    assert len(set(sizes)) == 3 and sizes == sorted(sizes)  # the launch time is read from the smallest one
    longest = profile.cuda_graphs.input_tokens + profile.cuda_graphs.output_tokens
    for model in profile.cuda_graphs.models:
        server = profile.server_with(profile.cuda_graphs.server | model.set)
        per_token = predict.kv_bytes_per_token(geometry.load(model.geometry), 2)
        blocks = predict.num_blocks(server.kv_cache_memory_bytes, per_token, server.block_size)
        assert predict.longest_model_len(blocks, server.block_size) >= server.max_model_len >= longest


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((), "cpu-tiny"),
        ((("NVIDIA H200", 141),), "h200"),
        ((("NVIDIA GeForce RTX 4060", 8),), "gpu-8gb"),
        ((("NVIDIA A100-SXM4-80GB", 80),), "gpu-8gb"),
    ],
)
def test_the_profile_follows_the_hardware(gpus, expected):
    assert choose(hardware(*gpus)) == expected


def test_a_gpu_that_is_too_small_is_refused_with_what_would_fit():
    small = hardware(("NVIDIA GeForce GTX 1650", 4))
    with pytest.raises(ConfigError) as caught:
        check_fits(load_profile("gpu-8gb"), small)
    text = str(caught.value)
    assert "at least 7 GiB" in text and "4.0 GiB" in text and "--profile cpu-tiny" in text
    with pytest.raises(ConfigError, match="no NVIDIA GPU is visible"):
        check_fits(load_profile("h200"), hardware())
    with pytest.raises(ConfigError, match=r"at least 16 GiB(.|\n)*--profile gpu-8gb, which fits"):
        check_fits(load_profile("h200"), hardware(("NVIDIA GeForce RTX 4060", 8)))
    check_fits(load_profile("gpu-8gb"), hardware(("small", 4), ("NVIDIA RTX 4090", 24)))
    check_fits(load_profile("cpu-tiny"), hardware())


# -- what stands in the place of a profile, and where its paths count from ----------------------------------------


def refused(given):
    with pytest.raises(ConfigError) as caught:
        load_profile(str(given))
    return str(caught.value)


def test_an_unknown_field_of_a_nested_table_lists_the_fields_of_that_table(own):
    told = refused(own(("rounds = 2", "runds = 2")))
    assert "did you mean rounds?" in told and "[load.shapes] knows: input_tokens" in told
    assert "kv_capacity" not in told and "pydantic" not in told


@pytest.mark.parametrize("wrong", ['[1, "a"]', "[0]", "[1, -1]", "[1.5]", "[nan]"])
def test_wrong_values_inside_a_list_are_named_by_their_place(own, wrong):
    told = refused(own(("concurrency = [1, 4]", f"concurrency = {wrong}")))
    assert "load.shapes.1.concurrency.1: must be" in told or "load.shapes.1.concurrency.0: must be" in told


def test_numbers_that_are_none_are_refused(own):
    assert "finite" in refused(own(("max_num_seqs = 64", "gpu_memory_utilization = nan")))


def test_a_folder_a_missing_file_and_a_binary_say_what_they_are(own, tmp_path):
    path = own()
    assert "is a folder" in refused(tmp_path) and "own.toml" in refused(tmp_path)
    assert f"There is no file {tmp_path / 'no.toml'}." in refused(tmp_path / "no.toml")
    assert "did you mean cpu-tiny?" in refused("cpu-tyni")
    (tmp_path / "own.toml").write_bytes(bytes(range(256)))
    assert "not even text" in refused(path)
    assert "There is no profile 'a\\x00b'." in refused("a\0b") or "cannot be read" in refused("a\0b")


def test_a_relative_model_is_found_from_the_folder_of_its_profile(own, tmp_path, monkeypatch):
    path = own(('model = "tiny"', 'model = "./my"'), ('geometry = "tiny"', 'geometry = "sub/config.json"'))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "config.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    profile = load_profile(path)
    assert profile.server.model == str(tmp_path / "my")
    assert profile.geometry == str(tmp_path / "sub" / "config.json")


def test_names_that_are_no_paths_stay_names(own):
    path = own(('model = "tiny"', 'model = "Qwen/Qwen3-0.6B"'))
    assert load_profile(path).server.model == "Qwen/Qwen3-0.6B" and load_profile(path).geometry == "tiny"


def test_a_point_has_at_least_so_many_requests():
    shape = load_grid.Shape(input_tokens=1, output_tokens=1, concurrency=(1, 8), rounds=2, min_requests=3)
    assert [shape.requests(c) for c in shape.concurrency] == [3, 16]


def test_a_profile_may_begin_with_the_mark_of_its_encoding(tmp_path):
    text = (profile_file.FOLDER / "cpu-tiny.toml").read_text(encoding="utf-8")
    (tmp_path / "own.toml").write_text("\ufeff" + text, encoding="utf-8")
    assert profile_file.read(str(tmp_path / "own.toml"))[1]["name"] == "cpu-tiny"
