package main

import (
	"bytes"
	"encoding/hex"
	"fmt"
)

func (v *vectors) secure(of object) {
	derived, context := of["derived"].(object), of["context"].(object)
	roots := map[string][]byte{"a": unhex(derived["root"]), "b": unhex(derived["other_root"])}
	s := &sumOf{Federation: "demo", Run: "r1", Round: 3, Exchange: 1, Roster: context["roster"].(string), Cid: "a", Root: roots["a"], Threshold: 3,
		Neighbours: map[string][]byte{"b": publicKeys(roots["b"])}}
	hexes := func(bytes []byte) string { return hex.EncodeToString(bytes) }
	v.same("label", s.label("pair mask", "a", "b"), derived["label"])
	v.same("public keys", hexes(publicKeys(roots["a"])), derived["seal"].(string)+derived["mask"].(string))
	v.same("other public keys", hexes(publicKeys(roots["b"])), derived["other_seal"].(string)+derived["other_mask"].(string))
	v.same("mask secret", hexes(maskSecret(roots["a"])), derived["mask_secret"])
	v.same("self secret", hexes(s.selfSecret()), derived["self_secret"])
	v.same("self mask key", hexes(s.selfMaskKey()), derived["self_mask_key"])
	v.same("pair mask key", hexes(s.pairMaskKey("b")), derived["pair_mask_key"])
	v.same("commitment", hexes(s.commitment()), derived["commitment"])
	v.same("stream", hexes(stream(roots["a"][:16], 40)), derived["stream"])
	count := len(derived["mask_shares"].(string)) / 64
	v.same("mask shares", hexes(bytes.Join(s.shares("mask", maskSecret(s.Root), count), nil)), derived["mask_shares"])
	v.same("self shares", hexes(bytes.Join(s.shares("self", s.selfSecret(), count), nil)), derived["self_shares"])
	packed := of["packed"].(object)
	words := []uint32{}
	for _, word := range list(packed["words"]) {
		words = append(words, uint32(word.(int64)))
	}
	for bits, expected := range packed["by_bits"].(object) {
		n := 0
		fmt.Sscan(bits, &n)
		v.same("packed "+bits, hexes(pack(words, n)), expected)
	}
	for _, line := range list(of["parameters"]) {
		p := list(line)
		n, k, t := p[0].(int64), p[1].(int64), p[2].(int64)
		v.same("parameters", []any{allowed(n, k, t-1), allowed(n, k, t), allowed(n, k, t+1)}, []any{false, true, false})
	}
	for _, line := range list(of["refused"]) {
		in := list(line)
		text := []byte(in[1].(string))
		if in[0] == "relay" || in[0] == "unmask" { // a device reads these
			v.refused("secure "+string(text), in[2], func() {
				if in[0] == "relay" {
					(&sumOf{Roster: context["roster"].(string)}).takeRelay(text)
				} else {
					(&sumOf{Roster: context["roster"].(string), Upload: []byte{1}}).reveal(text)
				}
			})
		}
	}
	for _, task := range of["tasks"].(object) {
		readMessage([]byte(task.(string)))
	}
	twice := &contribution{sum: object{"compare": []any{[]any{int64(0), int64(2)}, []any{int64(0), int64(2)}}}}
	v.refused("more columns than the model has", "bad_task", func() { twice.columns(make([]float64, 3)) })
	for name, job := range of["refused_jobs"].(object) {
		v.refused("job: "+name, "bad_task", func() { checkJob(job.(object)) })
	}
	v.words(of)
	v.cohort(of["cohort"].(object))
}

// cohort plays a device through a sum of seven.
func (v *vectors) cohort(of object) {
	said := of["messages"].(object)
	text := func(name string) []byte { return []byte(said[name].(string)) }
	root := unhex(of["devices"].(object)["dev-000"])
	v.same("prekeys", string(prekeysMessage([]int64{0, 1}, map[int64][]byte{0: root, 1: unhex(of["later_root"])})), said["prekeys"])
	s := newSum(text("roster"), "demo", "dev-000", func(int64) []byte { return root })
	v.same("shares", string(s.sharesMessage()), said["shares"])
	s.takeRelay(text("relay"))
	vector := []uint32{}
	for _, word := range list(of["vector"]) {
		vector = append(vector, uint32(word.(int64)))
	}
	v.same("upload", hex.EncodeToString(s.mask(vector)), of["upload"])
	v.same("reveal", string(s.reveal(text("unmask"))), said["reveal"])
}

// words of a device for recorded tasks, of which some fields are replaced; its trained models are given.
func (v *vectors) words(of object) {
	for _, value := range list(of["words"]) {
		line := value.(object)
		task := readMessage([]byte(of["tasks"].(object)[line["task"].(string)].(string)))["work"].(object)
		sum := task["sum"].(object)
		for name, value := range line["sum"].(object) {
			sum[name] = value
		}
		recorded := newPCG64(uint64(task["seed"].(int64)), 1)
		draw := func() float64 { return float64(recorded.uint64()>>11) / (1 << 53) }
		c := &contribution{task: task, sum: sum, scale: newScale(sum["scale"].(object), draw)}
		known := of["vectors"].(object)
		for _, one := range list(sum["centers"]) {
			c.centers = append(c.centers, numbers(known[readManifest(one).sha]))
		}
		if sum["points"] != nil {
			flat := numbers(known[readManifest(sum["points"]).sha])
			rows := fold(flat, len(c.columns(c.centers[0])))
			for ; len(rows) > 0; rows = rows[len(c.centers):] {
				c.points = append(c.points, rows[:len(c.centers)])
			}
		}
		for _, k := range list(sum["open"]) {
			c.open = append(c.open, int(k.(int64)))
		}
		models := [][]float64{}
		for _, model := range list(line["models"]) {
			models = append(models, numbers(model))
		}
		chosen := mine{Weights: numbers(line["weights"])}
		for _, k := range list(line["order"]) {
			chosen.Order = append(chosen.Order, int(k.(int64)))
		}
		found := []any{}
		for _, word := range c.words(models, chosen) {
			found = append(found, int(word))
		}
		v.same("words of "+string(writeJSON(line)), found, line["words"])
	}
	for _, value := range list(of["scales"]) {
		line := value.(object)
		v.same("levels", int(newScale(line, secretNumber).levels), line["levels"])
	}
}
