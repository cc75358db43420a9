package main

// Control messages from a coordinator: section 7; tasks of job `sum`: section 21.

import (
	"math"
	"regexp"
	"strconv"
	"strings"
)

var fieldsOf = map[string]string{
	"coord":   "boot:key online:bool proto:list spread_ms:int block:block window:1..16 src:list key?:key sig?:sig link?:int",
	"cat":     "ver:int catalog:manifest=catalog",
	"task":    "run:run round:u32 exchange:u32 left_ms:int job:fit|probe|sum center?:0..1023 program:manifest=program container:manifest=container schema:sha reply:object",
	"go":      "re:id sha256:sha shard:0..65535 window:1..16 have?:text",
	"ack":     "run:run round:u32 exchange:u32 attempt:u32 sha256:sha status:ok|dup|late|superseded|bad_hash|bad_schema|bad_codec|not_finite|rejected|too_big|retry retry_ms?:int detail?:detail",
	"err":     "re?:id code:text detail?:detail retry_ms?:int",
	"near":    "re:id",
	"stop":    "run:run round:u32 exchange:u32 why?:detail",
	"rebirth": "",
}

const (
	replyFields = "codec:f32|f16|i8 base:start|anchor|zero max_size:1..4294967296"
	fitFields   = "init?:manifest=model linear?:manifest=linear lr:positive momentum?:positive optimiser?:object mu:positive steps:1..1000000 batch:1..65536 seed:int rows?:rows slot?:slot upload?:bool buffers?:sent|own"
	probeFields = "models:list want:list prior?:list split?:train|test batch:1..65536 seed:int limit?:1..2147483648 buffers?:sent|own|batch label_totals?:list step?:manifest=container"
	sumFields   = "stage:prekeys|shares|add|show|tell|keep after?:int message?:manifest=sum work?:object step?:manifest=container"
	ofFit       = "part:choose|add|count|points choose:only|given|loss|nearest|shares|posterior centers:list open:list share:positive scale:object group?:0..15 compare?:list points?:manifest=points points_open?:list dealt?:bool hysteresis?:positive sigma?:positive move?:positive refresh?:bool repeats?:1..1000000"
	ofProbe     = "served:asked|center|mixture usual?:0..15 scale:object"
	ofScale     = "bits:16..32 devices:1..100000 clip:positive noise?:positive"
)

var words = map[string]*regexp.Regexp{"id": isID, "sha": isSha, "key": isKey, "sig": isSig, "run": isRun, "slot": isSlot,
	"rows": regexp.MustCompile(`^(ones|posterior:(0|[1-9][0-9]?)|all-but:[1-9][0-9]{0,8})$`), "detail": regexp.MustCompile(`^(?s).{0,200}$`), "text": regexp.MustCompile(`(?s)`)}

func readMessage(text []byte, kinds ...string) object {
	need(len(text) <= 8192, "too_big", "a message of %d bytes", len(text))
	m := readObject(text)
	need(m["v"] == int64(1), "bad_version", "v of a message")
	kind, _ := m["k"].(string)
	fields, known := fieldsOf[kind]
	need(known && (len(kinds) == 0 || contains(kinds, kind)), "bad_kind", "kind %q here", kind)
	checkFields(m, "id:id t:int epoch:int")
	checkFields(m, fields)
	if kind == "task" {
		checkFields(m["reply"].(object), replyFields)
		checkJob(m)
	}
	return m
}

func checkFields(m object, fields string) {
	for _, field := range strings.Fields(fields) {
		name, kind, _ := strings.Cut(field, ":")
		value, there := m[strings.TrimSuffix(name, "?")]
		if there || !strings.HasSuffix(name, "?") {
			checkField(name, kind, value)
		}
	}
}

func checkField(name, kind string, value any) {
	fits := false
	text, isText := value.(string)
	whole, isInt := value.(int64)
	switch {
	case strings.HasPrefix(kind, "manifest="):
		readManifest(value, kind[len("manifest="):])
		return
	case words[kind] != nil:
		fits = isText && words[kind].MatchString(text)
	case strings.Contains(kind, "|"):
		fits = isText && contains(strings.Split(kind, "|"), text)
	case strings.Contains(kind, ".."):
		low, high, _ := strings.Cut(kind, "..")
		least, _ := strconv.ParseInt(low, 10, 64)
		most, _ := strconv.ParseInt(high, 10, 64)
		fits = isInt && whole >= least && whole <= most
	case kind == "block":
		fits = isInt && whole >= 4096 && whole <= 1<<20 && whole%4096 == 0
	case kind == "int":
		fits = isInt && whole >= 0
	case kind == "u32":
		fits = isInt && whole >= 0 && whole <= math.MaxUint32
	case kind == "positive": // or zero
		x, isNumber := number(value)
		fits = isNumber && x >= 0
	case kind == "bool":
		_, fits = value.(bool)
	case kind == "list":
		_, fits = value.([]any)
	case kind == "object":
		_, fits = value.(object)
	}
	need(fits, "bad_field", "field %s", name)
}

func checkJob(m object) {
	switch m["job"] {
	case "fit":
		checkFit(m)
	case "probe":
		checkProbe(m)
	case "sum":
		checkSum(m)
	}
}

func checkFit(m object) {
	checkFields(m, fitFields)
	own := m["start"] == "own"
	if !own {
		readManifest(m["start"], "model")
	}
	anchor, anchored := m["anchor"]
	if anchored && anchor != "start" {
		readManifest(anchor, "model")
	}
	mu, _ := number(m["mu"])
	base := "zero"
	if reply, there := m["reply"].(object); there {
		base = reply["base"].(string)
	}
	need(mu == 0 || anchored, "bad_task", "mu without an anchor")
	if rule, there := m["optimiser"].(object); there {
		checkOptimiser(rule)
	}
	need((m["momentum"] == nil) != (m["optimiser"] == nil), "bad_task", "a fit has a momentum or an optimiser")
	need(!own || anchor != "start" && base != "start", "bad_task", "the coordinator does not hold an own start")
	need(base != "anchor" || anchored, "bad_task", "base anchor without an anchor")
}

func checkProbe(m object) {
	checkFields(m, probeFields)
	models, want := list(m["models"]), texts(m["want"])
	need(len(models) <= 16 && len(want) == len(list(m["want"])) && len(want) > 0, "bad_field", "models or want of a probe")
	for i, one := range want {
		need(contains([]string{"loss", "votes", "posterior", "confusion", "errors", "positions", "inputs", "answers", "grad", "labels"}, one), "bad_field", "want %q", one)
		need(!contains(want[:i], one), "bad_task", "%s is wanted twice", one)
		need(len(want) == 1 || one != "grad" && one != "labels", "bad_task", "%s is wanted alone", one)
	}
	for _, one := range models {
		kept, _ := one.(object)
		if own, there := kept["own"]; there {
			checkField("own", "slot", own)
			if one = kept["init"]; one == nil {
				continue
			}
		}
		readManifest(one, "model")
	}
	prior, sum := numbers(m["prior"]), 0.0
	for _, p := range prior {
		need(p >= 0, "bad_field", "prior")
		sum += p
	}
	need(len(models) > 0 || want[0] == "labels", "bad_task", "a probe without a model")
	need(m["prior"] == nil || len(prior) == len(models) && sum > 0 && sum <= math.MaxFloat64, "bad_task", "prior of a probe")
	need(m["label_totals"] == nil || len(list(m["label_totals"])) == len(models), "bad_task", "label_totals of a probe")
	need(m["buffers"] != "batch" || m["step"] != nil || want[0] == "grad" || want[0] == "labels", "bad_task", "buffers without a step")
}

func texts(value any) (out []string) {
	for _, one := range list(value) {
		if text, ok := one.(string); ok {
			out = append(out, text)
		}
	}
	return
}

func checkSum(m object) {
	checkFields(m, sumFields)
	stage := m["stage"].(string)
	_, hasMessage := m["message"]
	work, hasWork := m["work"].(object)
	need(hasMessage == contains([]string{"shares", "add", "show"}, stage), "bad_task", "message of stage %s", stage)
	need(hasWork == contains([]string{"add", "tell", "keep"}, stage), "bad_task", "work of stage %s", stage)
	need(m["after"] == nil || stage == "prekeys", "bad_task", "after beside stage %s", stage)
	if !hasWork {
		return
	}
	checkFields(work, "job:fit|probe")
	checkJob(work)
	sum, hasSum := work["sum"].(object)
	need(hasSum == (stage != "keep"), "bad_task", "sum of stage %s", stage)
	if hasSum {
		checkWords(work, sum)
	}
}

func checkWords(work, sum object) {
	if work["job"] == "probe" {
		checkFields(sum, ofProbe)
		need(sum["served"] != "center" || int(sum["usual"].(int64)) < len(list(work["models"])), "bad_task", "usual of a sum")
		checkFields(sum["scale"].(object), ofScale)
		return
	}
	checkFields(sum, ofFit)
	checkFields(sum["scale"].(object), ofScale)
	centers := list(sum["centers"])
	need(len(centers) >= 1 && len(centers) <= 16, "bad_field", "centers of a sum")
	for _, one := range centers {
		readManifest(one, "model")
	}
	last := int64(-1)
	for _, one := range list(sum["open"]) {
		k, isInt := one.(int64)
		need(isInt && k > last && k < int64(len(centers)), "bad_task", "open centers of a sum")
		last = k
	}
	share, _ := number(sum["share"])
	clip, _ := number(sum["scale"].(object)["clip"])
	need(share <= 1 && clip > 0, "bad_field", "share or clip of a sum")
	points := sum["part"] == "count" || sum["part"] == "points"
	compare := list(sum["compare"])
	need(len(compare) > 0 || !points && sum["choose"] != "nearest", "bad_task", "a sum without columns to compare")
	for _, one := range compare {
		bounds := numbers(one)
		need(len(bounds) == 2 && bounds[0] >= 0, "bad_field", "compare of a sum")
		need(bounds[0] < bounds[1], "bad_task", "compare of a sum")
	}
	need(!points || sum["points"] != nil && sum["points_open"] != nil, "bad_task", "a sum of centroids without centroids")
}

// knows tells whether a `coord` is signed by one of the trusted keys.
func (ring keyring) knows(federation string, coord object) bool {
	boot, _ := coord["boot"].(string)
	key, _ := coord["key"].(string)
	sig, _ := coord["sig"].(string)
	epoch, _ := coord["epoch"].(int64)
	return ring.verify(federation, "coord", boot, epoch, key, sig)
}
