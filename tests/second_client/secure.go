package main

// The masks and the messages of a device in a secure sum: section 21.

import (
	"encoding/binary"
	"math"
	"sort"
)

// readSum reads a message of a sum: `v`, then the fields.
func readSum(text []byte, fields string) object {
	need(len(text) <= 65536, "too_big", "a message of a sum of %d bytes", len(text))
	m := readObject(text)
	need(m["v"] == int64(1), "bad_version", "v of a message of a sum")
	checkFields(m, fields)
	return m
}

func byDevice(value any, size int) map[string][]byte {
	pairs, ok := value.([]any)
	need(ok && len(pairs) <= 255, "bad_field", "a list by device")
	out, last := map[string][]byte{}, ""
	for _, pair := range pairs {
		two := list(pair)
		need(len(two) == 2, "bad_field", "a list by device")
		cid, _ := two[0].(string)
		need(isCid.MatchString(cid) && cid > last, "bad_field", "a list by device")
		out[cid], last = readBase64(two[1]), cid
		need(len(out[cid]) == size, "bad_field", "a list by device")
	}
	return out
}

func toDevices(of map[string][]byte) []any {
	out, names := []any{}, []string{}
	for name := range of {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		out = append(out, []any{name, toBase64(of[name])})
	}
	return out
}

func devices(value any) (out []string) {
	names, ok := value.([]any)
	need(ok && len(names) <= 255, "bad_field", "a list of devices")
	for i, one := range names {
		name, _ := one.(string)
		need(isCid.MatchString(name) && (i == 0 || name > out[i-1]), "bad_field", "a list of devices")
		out = append(out, name)
	}
	return
}

func prekeysMessage(numbers []int64, roots map[int64][]byte) []byte {
	keys := []any{}
	for _, n := range numbers {
		keys = append(keys, []any{n, toBase64(publicKeys(roots[n]))})
	}
	return writeJSON(object{"v": 1, "keys": keys})
}

// newSum takes a roster; `root` finds the root of an unused prekey.
func newSum(text []byte, federation, cid string, root func(number int64) []byte) *sumOf {
	m := readSum(text, "run:run round:u32 exchange:u32 roster:sha cid:text number:int devices:5..100000 threshold:2..255 words:1..1073741824 bits:16..32")
	s := &sumOf{Federation: federation, Run: m["run"].(string), Roster: m["roster"].(string), Cid: cid, Round: m["round"].(int64), Exchange: m["exchange"].(int64),
		Number: m["number"].(int64), Devices: m["devices"].(int64), Threshold: m["threshold"].(int64), Words: m["words"].(int64), Bits: m["bits"].(int64),
		Neighbours: byDevice(m["neighbours"], 64), RosterText: text, Shown: map[string]string{}}
	need(m["cid"] == cid && s.Neighbours[cid] == nil, "bad_task", "a roster of another device")
	s.Root = root(s.Number)
	need(s.Root != nil, "bad_task", "prekey %d is not an unused one", s.Number)
	need(allowed(s.Devices, int64(len(s.Neighbours)), s.Threshold), "bad_task", "threshold %d of %d neighbours", s.Threshold, len(s.Neighbours))
	return s
}

// allowed tells whether t is the threshold of n devices with k neighbours: the greatest that keeps the bounds.
func allowed(n, k, t int64) bool {
	return keeps(n, k, t) && !keeps(n, k, t+1)
}

// keeps tells whether the bounds hold, and t is at most k/2+1.
func keeps(n, k, t int64) bool {
	missing, colluding := n*3/10, n/10
	if colluding < 1 {
		colluding = 1
	}
	if k > n-1 || k > 255 || t < 2 || t > k/2+1 || k < n-1 && k%2 == 1 {
		return false
	}
	size := float64(n)
	return size*above(n-1, missing, k, k-t+1) <= math.Pow(2, -20) && size*above(n-1, colluding, k, t) <= math.Pow(2, -40) &&
		(k == n-1 || size*(size-1)/2*above(n-1, missing+colluding, k, k) <= math.Pow(2, -40))
}

// above is P(X >= least) for k drawn of `all`, of which `marked` are marked.
func above(all, marked, k, least int64) (sum float64) {
	choose := func(n, r int64) float64 {
		a, _ := math.Lgamma(float64(n + 1))
		b, _ := math.Lgamma(float64(r + 1))
		c, _ := math.Lgamma(float64(n - r + 1))
		return a - b - c
	}
	for x := least; x <= k && x <= marked; x++ {
		if k-x <= all-marked && x >= 0 {
			sum += math.Exp(choose(marked, x) + choose(all-marked, k-x) - choose(all, k))
		}
	}
	return
}

func (s *sumOf) sharesMessage() []byte {
	others := s.others()
	ofMask, ofSelf := s.shares("mask", maskSecret(s.Root), len(others)), s.shares("self", s.selfSecret(), len(others))
	envelopes := map[string][]byte{}
	for i, other := range others {
		gcm, label := s.sealing(s.Cid, other)
		sealed := gcm.Seal(nil, make([]byte, 12), append(append([]byte{}, ofMask[i]...), ofSelf[i]...), label)
		sealed = append(sealed, s.digest("mask", s.Cid, other, ofMask[i])...)
		envelopes[other] = append(sealed, s.digest("self", s.Cid, other, ofSelf[i])...)
	}
	return writeJSON(object{"v": 1, "roster": s.Roster, "commitment": toBase64(s.commitment()), "envelopes": toDevices(envelopes)})
}

func (s *sumOf) takeRelay(text []byte) {
	m := readSum(text, "roster:sha")
	envelopes := byDevice(m["envelopes"], 112)
	need(m["roster"] == s.Roster && int64(len(envelopes)) >= s.Threshold, "bad_task", "a relay of another roster, or of fewer than %d", s.Threshold)
	need(s.RelayText == nil || equal(s.RelayText, text), "bad_task", "another relay of the same sum")
	for name := range envelopes {
		need(s.Neighbours[name] != nil, "bad_task", "an envelope of %s, who is no neighbour", name)
	}
	s.RelayText, s.Envelopes = text, envelopes
}

// mask makes the upload of a vector. Only the first vector of a sum is masked.
func (s *sumOf) mask(vector []uint32) []byte {
	if s.Upload != nil {
		return s.Upload
	}
	need(int64(len(vector)) == s.Words && s.Envelopes != nil, "bad_task", "%d words where the roster has %d", len(vector), s.Words)
	add := func(key []byte, sign uint32) {
		bytes := stream(key, 4*len(vector))
		for i := range vector {
			vector[i] += sign * binary.LittleEndian.Uint32(bytes[4*i:])
		}
	}
	add(s.selfMaskKey(), 1)
	for other := range s.Envelopes {
		sign := uint32(1)
		if other < s.Cid {
			sign = math.MaxUint32 // minus one
		}
		add(s.pairMaskKey(other), sign)
	}
	head := append([]byte{1, byte(s.Bits), 0, 0}, binary.LittleEndian.AppendUint32(nil, uint32(len(vector)))...)
	s.Upload = append(append(head, unhex(s.Roster)...), pack(vector, int(s.Bits))...)
	return s.Upload
}

func pack(words []uint32, bits int) []byte {
	out := make([]byte, (len(words)*bits+7)/8)
	for i, word := range words {
		for j := 0; j < bits; j++ {
			at := i*bits + j
			out[at/8] |= byte(word>>j&1) << (at % 8)
		}
	}
	return out
}

// reveal answers `unmask` with the self shares of survivors and the mask shares of those that dropped out.
func (s *sumOf) reveal(text []byte) []byte {
	m := readSum(text, "roster:sha")
	survivors, dropped := devices(m["survivors"]), devices(m["dropped"])
	asked := map[string]string{}
	for _, name := range survivors {
		asked[name] = "self"
	}
	for _, name := range dropped {
		need(asked[name] == "", "bad_task", "%s in both lists", name)
		asked[name] = "mask"
	}
	need(m["roster"] == s.Roster && s.Upload != nil, "bad_task", "a question of another sum, or before the upload")
	need(len(asked) == len(s.Envelopes) && int64(len(survivors)) >= s.Threshold, "bad_task", "lists that are not the active neighbours")
	for name, kind := range asked {
		need(s.Envelopes[name] != nil && (len(s.Shown) == 0 || s.Shown[name] == kind), "bad_task", "another question than before, or about %s", name)
	}
	s.Shown = asked
	shown := map[string]map[string][]byte{"self": {}, "mask": {}}
	for name, kind := range asked {
		gcm, label := s.sealing(name, s.Cid)
		envelope := s.Envelopes[name]
		both, err := gcm.Open(nil, make([]byte, 12), envelope[:80], label)
		if err != nil || !equal(s.digest("mask", name, s.Cid, both[:32]), envelope[80:96]) || !equal(s.digest("self", name, s.Cid, both[32:]), envelope[96:]) {
			continue // what its neighbour sealed wrongly is not shown
		}
		shown[kind][name] = map[string][]byte{"mask": both[:32], "self": both[32:]}[kind]
	}
	return writeJSON(object{"v": 1, "roster": s.Roster, "self": toDevices(shown["self"]), "mask": toDevices(shown["mask"])})
}
